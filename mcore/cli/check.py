"""`mcore check`: would a training command run, and what would it be? Nothing is started.

It takes the words of a `pretrain_gpt.py` command, with or without its launcher. Files of data need
not be on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mcore.cli.launcher import read_launcher
from mcore.config.command_line import flag_names
from mcore.config.fields import flag_of, problems_of
from mcore.config.run import Resolved, RunConfig, resolve
from mcore.errors import ConfigError, McoreError
from mcore.tokenizers import build_tokenizer
from mcore.training.arguments import read, value_sources
from mcore.training.idle_options import idle_options, remarks
from mcore.training.memory import RankMemory, predict_memory
from mcore.training.options import CHECKPOINT, CONFIG_FILE, DEEPSPEED, DEFAULT, Source
from mcore.training.parameter_count import count_parameters
from mcore.training.pipeline_plan import plan_pipeline, plan_split
from mcore.training.places import absent_files, corpus_files, tokenizer_files
from mcore.training.prepare import Settled, settle_options


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "check",
        help="examine a pretrain_gpt.py command: options with their origin, batch, parameters",
        add_help=False,  # --help is that of the training command
        prefix_chars="\0",  # so that its flags are plain words here
    )
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("mcore check")
    group.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="Processes; 1 when absent. A command that begins with `torchrun` or `deepspeed` says "
        "it itself; deepspeed's is printed as torchrun's.",
    )
    group.add_argument("--json", action="store_true", help="Print one JSON object.")


def run(args: argparse.Namespace) -> int:
    """Print the examined command; 0 it would run, 2 it would not, 1 its checkpoint is at fault."""
    launched = read_launcher(args.words)
    arguments = read(launched.words, _add_own_flags, "mcore check")
    as_json = bool(arguments.extra.json)
    size = arguments.extra.world_size
    try:
        if size is not None and launched.world_size is not None:
            raise ConfigError(
                f"{launched.launcher}'s own words say the number of processes; drop --world-size"
            )
        if size is None:
            size = 1 if launched.world_size is None else launched.world_size
        if size < 1:
            raise ConfigError(f"--world-size is {size}; use 1 or more")
        settled = settle_options(arguments, size, _wrong_places)
        report = examine(settled, launched.line)
    except McoreError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "problems": problems_of(error)}, indent=1))
        return 2 if isinstance(error, ConfigError) else 1
    print(json.dumps(report.to_dict(), indent=1) if as_json else "\n".join(report.lines()))
    return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a command would be.

    Attributes:
        config: its configuration.
        resolved: batch arithmetic and length.
        world_size: processes.
        split: layers of each stage.
        schedule: name of the pipeline schedule.
        sources: (section, field) -> where the value came from.
        notes: what the run would say about its options.
        absent: files that are named and not on this machine.
        num_parameters: of the model, each counted once and without padding; None where the
            vocabulary's size is not known here.
        memory: predicted bytes of each pipeline rank, empty likewise.
        launch: the torchrun command that another launcher's stands for, or None.
    """

    config: RunConfig
    resolved: Resolved
    world_size: int
    split: Sequence[int]
    schedule: str
    sources: dict[tuple[str, str], Source]
    notes: Sequence[str]
    absent: Sequence[str]
    num_parameters: int | None
    memory: Sequence[RankMemory]
    launch: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        model = self.config.model
        return {
            "ok": True,
            "launch": self.launch,
            "world_size": self.world_size,
            "layout": {
                "tensor": model.tensor_model_parallel_size,
                "pipeline": model.pipeline_model_parallel_size,
                "data": self.resolved.data_parallel_size,
                "order": model.order,
                "schedule": self.schedule,
                "layers": list(self.split),
            },
            "batch": dataclasses.asdict(self.resolved),
            "parameters": self.num_parameters,
            "memory": [
                {**dataclasses.asdict(rank), "between_steps": rank.between_steps, "peak": rank.peak}
                for rank in self.memory
            ],
            "notes": list(self.notes),
            "absent": list(self.absent),
            "config": {
                section: {field: value for field, _, value, _ in rows}
                for section, rows in self._options().items()
            },
            "sources": {
                section: {field: dataclasses.asdict(source) for field, _, _, source in rows}
                for section, rows in self._options().items()
            },
        }

    def lines(self) -> Iterator[str]:
        """The report as text."""
        if self.launch is not None:
            each = ", on every machine" if "--nnodes" in self.launch else ""
            yield f"launch{each}: {self.launch}"
        yield from self._summary()
        for note in self.notes:
            yield f"note          {note}"
        for path in self.absent:
            yield f"absent        {path} is not on this machine"
        for section, rows in self._options().items():
            yield f"\n{section}"
            for _, flag, value, source in rows:
                shown = not value if flag.startswith("--no-") else value
                yield f"  {flag:<52} {_shown(shown):<24} {_origin(source, flag)}".rstrip()

    def _summary(self) -> Iterator[str]:
        model, resolved = self.config.model, self.resolved
        tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
        dp, tokens = resolved.data_parallel_size, resolved.global_batch_size * resolved.seq_length
        yield f"layout        tensor {tp} x pipeline {pp} x data {dp} = {self.world_size} processes"
        if pp > 1:
            yield f"pipeline      {self.schedule}, layers of each stage {_shown(self.split)}"
        yield (
            f"batch         micro {resolved.micro_batch_size} x microbatches "
            f"{resolved.num_microbatches} x data {dp} = {resolved.global_batch_size} samples, "
            f"{tokens:,} tokens a step"
        )
        yield (
            f"training      {resolved.train_iters:,} steps, "
            f"{resolved.train_iters * tokens:,} tokens"
        )

        if self.num_parameters is None:
            yield "parameters    unknown: give --vocab-size, or run where the tokenizer's files are"
            return
        yield f"parameters    {self.num_parameters:,}"
        for rank in self.memory:
            which = f"pipeline rank {rank.pipeline_rank}" if pp > 1 else "each rank"
            yield (
                f"memory        {which}: {_bytes(rank.between_steps)} between steps, "
                f"{_bytes(rank.peak)} at the peak ({_bytes(rank.activations)} of activations); "
                "predicted, without what CUDA and NCCL take"
            )

    def _options(self) -> dict[str, list[tuple[str, str, Any, Source]]]:
        """Section -> (field, flag, value, source) of every option that has a flag."""
        tree = self.config.to_dict()
        options = {}
        for section in dataclasses.fields(self.config):
            fields = dataclasses.fields(getattr(self.config, section.name))
            options[section.name] = [
                (
                    field.name,
                    flag_names(field, described)[0],
                    tree[section.name][field.name],
                    self.sources[section.name, field.name],
                )
                for field in fields
                if (described := flag_of(field)) is not None
                and (not described.hidden or self._is_set(section.name, field.name))
            ]
        return options

    def _is_set(self, section: str, field: str) -> bool:
        return self.sources[section, field].kind != DEFAULT


def _wrong_places(sections: Mapping[str, Any]) -> list[str]:
    """What would stand in the way on this machine, but for files that are elsewhere."""
    return absent_files(sections, corpus_files)[1]


def examine(settled: Settled, launch: str | None = None) -> Report:
    """Work out what a checked command would be; `launch` is the torchrun command of it."""
    config, world_size = settled.config, settled.world_size
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    absent, _ = absent_files(sections, corpus_files)
    can_read = not {*tokenizer_files(config.tokenizer)} & {*absent}
    if can_read:  # which also compares --vocab-size with the files
        size = build_tokenizer(config.tokenizer).vocab_size
        tokenizer = dataclasses.replace(config.tokenizer, vocab_size=size)
        config = dataclasses.replace(config, tokenizer=tokenizer)
    plan, resolved = plan_pipeline(config), resolve(config, world_size)
    on_cpu = config.runtime.device == "cpu"
    idle = idle_options(config, resolved.data_parallel_size, on_cpu=on_cpu)
    known = config.tokenizer.vocab_size is not None
    return Report(
        config=config,
        resolved=resolved,
        world_size=world_size,
        split=plan_split(config, plan),
        schedule=plan.schedule.name,
        sources=value_sources(settled.arguments, settled.model_options),
        notes=[
            *settled.notes,
            *(f"{option} has no effect: {reason}" for option, reason in idle),
            *remarks(config),
        ],
        absent=absent,
        num_parameters=_num_parameters(config) if known else None,
        memory=predict_memory(config, world_size) if known else (),
        launch=launch,
    )


def _num_parameters(config: RunConfig) -> int:
    """Parameters of the whole model, as on one rank without padding."""
    whole = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=None,
        ),
        tokenizer=dataclasses.replace(config.tokenizer, make_vocab_size_divisible_by=1),
    )
    layers = config.model.num_layers
    return count_parameters(whole, layers, pre_process=True, post_process=True).total


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _origin(source: Source, flag: str) -> str:
    if source.kind == DEFAULT:
        return ""
    if source.kind in (CONFIG_FILE, DEEPSPEED, CHECKPOINT):
        return f"{source.kind}: {source.spelled}"
    return source.kind if source.spelled == flag else f"{source.kind}: {source.spelled}"
