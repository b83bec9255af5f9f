"""From a command line to a checked configuration, before any process group exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.checks import can_be_scheduled, problems_between
from mcore.config.fields import AtFaultError, refuse
from mcore.config.partial import as_far_as_known, value_if_known, without
from mcore.config.run import RunConfig, microbatch_counts
from mcore.data.blend import dangling_weight
from mcore.errors import CheckpointError, McoreError
from mcore.training import checkpointing
from mcore.training.arguments import (
    REQUIRED_MODEL_OPTIONS,
    Arguments,
    build_sections,
    in_users_words,
    overrides,
)
from mcore.training.deepspeed_options import with_deepspeed, write_resolved
from mcore.training.initialize import Launch
from mcore.training.pipeline_plan import plan_pipeline, plan_split, prove_pipeline, read_schedule
from mcore.training.places import DataFiles, problems_here
from mcore.training.save_roots import has_start, make_root
from mcore.training.scalars import missing_packages
from mcore.training.start_check import start_problems

#: Sections of a configuration by name; they may lack fields that are at fault.
Sections = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A checked command line.

    Attributes:
        config: the configuration.
        notes: what to tell the user about how it came about.
        loads: there is a checkpoint to start from.
    """

    config: RunConfig
    notes: tuple[str, ...]
    loads: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """A configuration with its history.

    Attributes:
        config: the configuration.
        world_size: processes of the job.
        arguments: what was given, with what a DeepSpeed file added.
        model_options: what a checkpoint supplied, or None.
        notes: what to tell the user about how it came about.
    """

    config: RunConfig
    world_size: int
    arguments: Arguments
    model_options: Mapping[str, Any] | None
    notes: tuple[str, ...]


def prepare(arguments: Arguments, launch: Launch, data_files: DataFiles | None = None) -> Prepared:
    """Build and check the configuration; no process group exists yet.

    Args:
        arguments: the command line.
        launch: this process.
        data_files: files of the program's data, which have to be there; None = they are its own
            business.

    Raises:
        McoreError: anything wrong with the options, or with the files and directories that they
            name.
    """
    settled = settle_options(
        arguments, launch.world_size, lambda built: problems_here(built, launch, data_files)
    )
    options = settled.config.checkpoint
    if options.save is not None:
        make_root(options.save)
        if arguments.deepspeed is not None and launch.rank == 0:
            write_resolved(arguments.deepspeed, settled.config, launch.world_size)
    return Prepared(settled.config, settled.notes, has_start(options))


def settle_options(
    arguments: Arguments, world_size: int, also: Callable[[Sections], Iterable[str]] | None = None
) -> Settled:
    """Build and check the configuration without touching a file, but for a checkpoint's.

    Args:
        arguments: the command line.
        world_size: processes of the job.
        also: finds more that is wrong with the sections, which may lack fields at fault.

    Raises:
        ConfigError: everything wrong with the options, in the user's own names.
        CheckpointError: nothing but --use-checkpoint-args without a checkpoint that can be read.
    """
    arguments = with_deepspeed(arguments, world_size)
    notes = list(arguments.notes)
    options, unread = None, None
    try:
        options = _options_of_checkpoint(arguments)
    except CheckpointError as error:
        unread = error
        arguments = dataclasses.replace(arguments, malformed=arguments.malformed | _STORED)
    if options is not None:
        notes += overrides(arguments, options)
    sections, problems = build_sections(arguments, options)
    config = RunConfig(**sections)
    problems = [*arguments.problems, *problems, *problems_between(config, world_size)]
    problems += _schedule_problems(config, world_size)
    problems += as_far_as_known(start_problems, config, world_size)
    problems += [*_dangling_weights(arguments), *as_far_as_known(missing_packages, config.logging)]
    if unread is not None:  # which is told
        nothing = without(CheckpointConfig, {}, [f.name for f in fields(CheckpointConfig)])
        sections["checkpoint"] = nothing
    problems += [] if also is None else also(sections)
    if unread is not None:
        if not problems:
            raise unread
        problems.insert(0, str(unread))
    refuse([in_users_words(problem, arguments) for problem in problems])
    return Settled(config, world_size, arguments, options, tuple(notes))


#: Options that a checkpoint was to supply.
_STORED = frozenset(
    {("training", "seq_length"), *(("model", name) for name in REQUIRED_MODEL_OPTIONS)}
)


def _options_of_checkpoint(arguments: Arguments) -> dict[str, Any] | None:
    load = arguments.get("checkpoint", "load")
    if not arguments.get("checkpoint", "use_checkpoint_args") or load is None:
        return None
    return checkpointing.stored_model_options(
        load,
        arguments.get("checkpoint", "ckpt_step"),
        fall_back=arguments.get("checkpoint", "on_damaged_checkpoint") == "fallback",
    )


def _dangling_weights(arguments: Arguments) -> Iterator[str]:
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = arguments.get("data", field)
        problem = None if words is None else dangling_weight(words)
        if problem is not None:
            yield f"{field} {problem}"


def _schedule_problems(config: RunConfig, world_size: int) -> list[str]:
    """What is wrong with the schedule, which is simulated where all that it rests on is right."""
    schedule = value_if_known(config.pipeline, "pipeline_schedule")
    try:
        if schedule is not None and schedule.startswith("file:"):
            read_schedule(schedule.removeprefix("file:"))
        if not can_be_scheduled(config, world_size):
            return []
        pipeline = plan_pipeline(config)
        plan_split(config, pipeline)
        prove_pipeline(pipeline, microbatch_counts(config, world_size))
    except McoreError as error:
        return [str(error)]
    except AtFaultError:
        pass
    return []
