"""The command line: flags are generated from the configuration, once, and become a `RunConfig`.

Only what was typed is kept at first, so that a checkpoint can supply the model's options and a
typed flag can win over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mcore.config.checks import refuse
from mcore.config.command_line import StrictParser, add_flags, spelled_as_flags
from mcore.config.fields import flag_of
from mcore.config.run import OPTION_NAMES, RunConfig
from mcore.errors import ConfigError
from mcore.training.legacy_flags import LEGACY, LegacyFlag, refused_flags

ExtraArguments = Callable[[argparse.ArgumentParser], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line.

    Attributes:
        typed: section -> field -> value, only what was typed.
        extra: what `extra_args_provider` added, with its defaults.
        notes: what to say about legacy spellings that were accepted.
    """

    typed: dict[str, dict[str, Any]]
    extra: argparse.Namespace
    notes: tuple[str, ...]

    def get(self, section: str, name: str) -> Any:
        """A typed value, or the field's default."""
        values = self.typed.get(section, {})
        if name in values:
            return values[name]
        fields = {field.name: field for field in dataclasses.fields(_sections()[section])}
        default = fields[name].default
        return None if default is dataclasses.MISSING else default


def parse(argv: Sequence[str], extra_args_provider: ExtraArguments | None = None) -> Arguments:
    """Read a command line without building the configuration yet.

    Args:
        argv: words after the program's name.
        extra_args_provider: adds a program's own arguments to the parser, as in Megatron.

    Raises:
        ConfigError: unknown, abbreviated or malformed flags.
    """
    parser = build_parser(extra_args_provider)
    words = list(argv)
    values = vars(parser.parse_args(words))
    typed: dict[str, dict[str, Any]] = {name: {} for name in _sections()}
    extra: dict[str, Any] = {}
    legacy: list[tuple[LegacyFlag, Any]] = []
    for destination, value in values.items():
        section, _, field = destination.partition(".")
        if section in typed and field:
            typed[section][field] = value
        elif section == "legacy":
            legacy.append((LEGACY[field], value))
        else:
            extra[destination] = value
    notes = [note for item, value in legacy if (note := _apply_legacy(item, value, typed))]
    _check_grouped_queries(typed, [item.flag for item, _ in legacy])
    return Arguments(typed, argparse.Namespace(**extra), tuple(notes))


def _apply_legacy(item: LegacyFlag, value: Any, typed: dict[str, dict[str, Any]]) -> str | None:
    for (section, field), wanted in item.sets(value).items():
        already = typed[section].get(field, wanted)
        if already != wanted and item.yields:
            continue
        if already != wanted:
            raise ConfigError(
                f"{item.flag} means {field} = {wanted!r}, but the command line also gives "
                f"{already!r}"
            )
        typed[section][field] = wanted
    return item.note


def _check_grouped_queries(typed: dict[str, dict[str, Any]], legacy: list[str]) -> None:
    """Megatron drops --num-query-groups in silence without its switch; here either is explained."""
    groups = typed["model"].get("num_query_groups")
    if groups is not None and "--group-query-attention" not in legacy:
        raise ConfigError(
            f"--num-query-groups {groups} needs --group-query-attention; add it or drop the number"
        )
    if groups is None and "--group-query-attention" in legacy:
        typed["model"]["num_query_groups"] = 1


def build_config(arguments: Arguments, model_options: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of a run.

    Args:
        arguments: what was typed.
        model_options: the model's options from a checkpoint, by option name; typed values win.

    Raises:
        ConfigError: a required option is absent, or values that cannot be right, of all sections.
    """
    sections: dict[str, Any] = {}
    problems = []
    for name, kind in _sections().items():
        values = dict(_from_options(kind, model_options or {}))
        values.update(arguments.typed[name])
        if name == "model":
            values.update(_precision(arguments))
            _require_model(values)
        try:
            sections[name] = kind(**values)
        except ValueError as error:
            problems.append(spelled_as_flags(str(error), kind))
    refuse(problems)
    config = RunConfig(**sections)
    if model_options and config.training.seq_length is None and model_options.get("seq_length"):
        training = dataclasses.replace(config.training, seq_length=model_options["seq_length"])
        config = dataclasses.replace(config, training=training)
    return config


def overrides(arguments: Arguments, model_options: Mapping[str, Any]) -> list[str]:
    """Typed model options that differ from the checkpoint's, in words."""
    lines = []
    for name, kind in _sections().items():
        stored = _from_options(kind, model_options)
        for field, value in arguments.typed[name].items():
            if field in stored and stored[field] != value:
                lines.append(
                    f"{field}: {value!r} from the command line, checkpoint {stored[field]!r}"
                )
    return lines


def _from_options(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(kind):
        description = flag_of(field)
        option = OPTION_NAMES.get(field.name, field.name)
        if description is not None and description.model and options.get(option) is not None:
            values[field.name] = options[option]
    return values


def _precision(arguments: Arguments) -> dict[str, Any]:
    if arguments.get("training", "bf16"):
        return {"params_dtype": torch.bfloat16}
    if arguments.get("optimizer", "fp16"):
        return {"params_dtype": torch.float16}
    return {}


def _require_model(values: Mapping[str, Any]) -> None:
    missing = [
        "--" + name.replace("_", "-")
        for name in ("num_layers", "hidden_size", "num_attention_heads")
        if name not in values
    ]
    if missing:
        raise ConfigError(
            f"missing: {', '.join(missing)} (or take the model from a checkpoint with "
            "--use-checkpoint-args)"
        )


def build_parser(extra_args_provider: ExtraArguments | None = None) -> StrictParser:
    """The parser of every flag, in one group per configuration section."""
    parser = StrictParser(
        refused=refused_flags(),
        prog="pretrain_gpt.py",
        description="Pretrain a GPT model. Start it with torchrun for more than one process.",
    )
    for name, kind in _sections().items():
        group = parser.add_argument_group(f"{name} options")
        add_flags(group, kind, prefix=f"{name}.", may_lack_required=True)
    legacy = parser.add_argument_group("other spellings, kept for existing scripts")
    for key, item in LEGACY.items():
        legacy.add_argument(
            item.flag,
            dest=f"legacy.{key}",
            help=item.help,
            default=argparse.SUPPRESS,
            **item.options,
        )
    if extra_args_provider is not None:
        extra_args_provider(parser)
    return parser


def _sections() -> dict[str, type]:
    """Section name -> configuration class, in the order of the tree."""
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}
