"""The command line: flags are generated from the configuration, once, and become a `RunConfig`.

Only what was given is kept at first, so that a checkpoint can supply the model's options, and the
command line can win over it and over files. What is wrong is collected and told together.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mcore.config.command_line import StrictParser, add_flags, spelled_as_flags
from mcore.config.fields import flag_of, refuse
from mcore.config.partial import build_as_far_as_known
from mcore.config.run import OPTION_NAMES, RunConfig
from mcore.errors import ConfigError
from mcore.training.legacy_flags import LEGACY, refused_flags
from mcore.training.option_file import read_option_file
from mcore.training.options import (
    CHECKPOINT,
    COMMAND_LINE,
    DEFAULT,
    FILES,
    Options,
    Source,
    sections,
    spellings,
)

ExtraArguments = Callable[[argparse.ArgumentParser], Any]

#: What a model has to be told; the command line or a checkpoint does.
REQUIRED_MODEL_OPTIONS = ("num_layers", "hidden_size", "num_attention_heads")


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """A parsed command line, with the files that it names.

    Attributes:
        typed: section -> field -> value, only what was given.
        extra: what `extra_args_provider` added, with its defaults.
        notes: what to say about legacy spellings that were accepted.
        sources: (section, field) -> where a value came from.
        problems: what is wrong with the words themselves.
        deepspeed: the DeepSpeed configuration file, if there is one.
        malformed: (section, field) of values that could not be read.
    """

    typed: dict[str, dict[str, Any]]
    extra: argparse.Namespace
    notes: tuple[str, ...]
    sources: Mapping[tuple[str, str], Source] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()
    deepspeed: str | None = None
    malformed: frozenset[tuple[str, str]] = frozenset()

    def get(self, section: str, name: str) -> Any:
        """A given value, or the field's default."""
        values = self.typed.get(section, {})
        if name in values:
            return values[name]
        fields = {field.name: field for field in dataclasses.fields(sections()[section])}
        default = fields[name].default
        return None if default is dataclasses.MISSING else default

    def source(self, section: str, name: str) -> Source:
        """Where a value came from, the checkpoint left out."""
        return self.sources.get((section, name), Source(DEFAULT, ""))


def parse(argv: Sequence[str], extra_args_provider: ExtraArguments | None = None) -> Arguments:
    """Read a command line that has to be right, without building the configuration yet.

    Args:
        argv: words after the program's name.
        extra_args_provider: adds a program's own arguments to the parser, as in Megatron.

    Raises:
        ConfigError: unknown, abbreviated or malformed flags.
    """
    arguments = read(argv, extra_args_provider)
    refuse(arguments.problems)
    return arguments


def read(
    argv: Sequence[str],
    extra_args_provider: ExtraArguments | None = None,
    prog: str = "pretrain_gpt.py",
) -> Arguments:
    """Read a command line and the `--config` file that it names; the command line wins.

    Args:
        argv: words after the program's name.
        extra_args_provider: adds a program's own arguments to the parser, as in Megatron.
        prog: name of the program in its help.

    Returns:
        What was given. What is wrong with it is in `problems`.
    """
    parser = build_parser(extra_args_provider, prog)
    words = list(argv)
    namespace, problems = parser.collect(words)
    spelled = parser.spellings(words)
    sources = {name: Source(COMMAND_LINE, flag) for name, flag in spelled.items()}
    given = {name: value for name, value in vars(namespace).items() if name in spelled}
    options = Options(problems=problems)
    options.take(given, sources)
    path = options.files.get("config")
    if path is not None:
        try:
            options = options.over(read_option_file(path, parser))
        except ConfigError as error:
            options.problems.append(str(error))
    _check_grouped_queries(options)
    deepspeed = _deepspeed_file(options)
    defaults = {name: value for name, value in vars(namespace).items() if "." not in name}
    return Arguments(
        options.typed,
        argparse.Namespace(**{**defaults, **options.extra}),
        tuple(options.notes),
        options.sources,
        tuple(options.problems),
        deepspeed,
        frozenset(_place(name) for name in parser.malformed),
    )


def _place(destination: str) -> tuple[str, str]:
    section, _, field = destination.partition(".")
    return section, field


def _check_grouped_queries(options: Options) -> None:
    """Megatron drops --num-query-groups in silence without its switch; here either is explained."""
    groups = options.typed["model"].get("num_query_groups")
    switches = {"--group-query-attention", "--num-key-value-heads"}
    if groups is not None and not switches.intersection(options.legacy):
        options.problems.append(
            f"--num-query-groups {groups} needs --group-query-attention; add it or drop the number"
        )
    if groups is None and "--group-query-attention" in options.legacy:
        options.typed["model"]["num_query_groups"] = 1


def _deepspeed_file(options: Options) -> str | None:
    path: str | None = options.files.get("deepspeed_config")
    if options.files.get("deepspeed") and path is None:
        options.problems.append(
            "--deepspeed reads the settings of a DeepSpeed JSON file: add --deepspeed_config FILE, "
            "or drop it, since every setting has a flag"
        )
    return path


def build_config(arguments: Arguments, model_options: Mapping[str, Any] | None = None) -> RunConfig:
    """The configuration of a run.

    Args:
        arguments: what was given.
        model_options: the model's options from a checkpoint, by option name; given values win.

    Raises:
        ConfigError: a required option is absent, or values that cannot be right, of all sections.
    """
    built, problems = build_sections(arguments, model_options)
    problems = [*arguments.problems, *problems]
    refuse([in_users_words(problem, arguments) for problem in problems])
    return RunConfig(**built)


def build_sections(
    arguments: Arguments, model_options: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The sections of a configuration, and what is wrong with them.

    Where something is wrong with a section, it lacks the fields at fault: `mcore.config.partial`.
    """
    built: dict[str, Any] = {}
    problems = []
    options = model_options or {}
    for name, kind in sections().items():
        values = {**_from_options(kind, options), **arguments.typed[name]}
        unknown = {field for section, field in arguments.malformed if section == name}
        if name == "model":
            values.update(_precision(arguments))
            missing = [field for field in REQUIRED_MODEL_OPTIONS if field not in values]
            problems += _missing(missing, arguments)
            unknown.update(missing)
        if name == "training" and values.get("seq_length") is None and options.get("seq_length"):
            values["seq_length"] = options["seq_length"]
        unusable = [field for field, value in values.items() if _is_no_number(value)]
        problems += [f"`{field}` is {values[field]}; use a finite number" for field in unusable]
        # What could not be read is told; nothing else is concluded from its absence.
        built[name], found = build_as_far_as_known(kind, values, unknown.union(unusable))
        problems += found
    return built, problems


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _missing(names: Sequence[str], arguments: Arguments) -> list[str]:
    flags = [spellings()[name] for name in names if ("model", name) not in arguments.malformed]
    if not flags:
        return []
    return [
        f"missing: {', '.join(flags)} (or take the model from a checkpoint with "
        "--use-checkpoint-args)"
    ]


def in_users_words(problem: str, arguments: Arguments) -> str:
    """A problem in the flags of the command line, with the names that the user gave them."""
    text = spelled_as_flags(problem, spellings())
    for (section, field), source in arguments.sources.items():
        flag = spellings().get(field)
        if flag is None or source.spelled.startswith(flag) or source.kind == DEFAULT:
            continue
        if source.spelled in text or not re.search(rf"(?<![\w-]){flag}(?![\w-])", text):
            continue
        value = arguments.typed[section][field]
        text += f" ({flag} {value} comes from {source})"
    return text


def value_sources(
    arguments: Arguments, model_options: Mapping[str, Any] | None = None
) -> dict[tuple[str, str], Source]:
    """(section, field) -> where the value of every option came from."""
    found = {}
    for name, kind in sections().items():
        stored = _from_options(kind, model_options or {})
        for field in dataclasses.fields(kind):
            source = arguments.source(name, field.name)
            if source.kind == DEFAULT and field.name in stored:
                source = Source(CHECKPOINT, str(arguments.get("checkpoint", "load")))
            found[name, field.name] = source
    return found


def overrides(arguments: Arguments, model_options: Mapping[str, Any]) -> list[str]:
    """Given model options that differ from the checkpoint's, in words."""
    lines = []
    for name, kind in sections().items():
        stored = _from_options(kind, model_options)
        for field, value in arguments.typed[name].items():
            if field in stored and stored[field] != value:
                origin = arguments.source(name, field).kind
                flag = spellings()[field]
                lines.append(f"{flag}: {value!r} from the {origin}, checkpoint {stored[field]!r}")
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


def build_parser(
    extra_args_provider: ExtraArguments | None = None, prog: str = "pretrain_gpt.py"
) -> StrictParser:
    """The parser of every flag, in one group per configuration section."""
    parser = StrictParser(
        refused=refused_flags(),
        prog=prog,
        description="Pretrain a GPT model. Start it with torchrun for more than one process.",
    )
    for name, kind in sections().items():
        group = parser.add_argument_group(f"{name} options")
        add_flags(group, kind, prefix=f"{name}.", may_lack_required=True)
    for flags, options in FILE_FLAGS.items():
        parser.add_argument(*flags, **{"default": argparse.SUPPRESS, **options})
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


#: Flags that name files of options.
FILE_FLAGS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("--config",): {
        "dest": f"{FILES}.config",
        "metavar": "FILE.yaml",
        "help": "Options by their names; what is typed on the command line wins.",
    },
    ("--deepspeed_config", "--deepspeed-config"): {
        "dest": f"{FILES}.deepspeed_config",
        "metavar": "FILE.json",
        "help": "DeepSpeed's settings, read as options of mcore; what is typed must agree.",
    },
    ("--deepspeed",): {
        "dest": f"{FILES}.deepspeed",
        "action": "store_true",
        "help": "Says that --deepspeed_config is given, as Megatron-DeepSpeed wants it said.",
    },
}
