"""The options of a DeepSpeed file join those of the command line, with which they must agree."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from mcore.config.run import RunConfig, resolve
from mcore.deepspeed import read_config, resolved_config, translate
from mcore.errors import CheckpointError, ConfigError
from mcore.training.arguments import Arguments
from mcore.training.options import DEEPSPEED, Source, spellings

#: In the save root: the DeepSpeed file as the run had it.
RESOLVED_NAME = "deepspeed_config.resolved.json"

#: Options that a run needs and such a file may supply, where the command line does not.
_SUPPLIED = (
    ("training", "global_batch_size"),
    ("training", "micro_batch_size"),
    ("optimizer", "lr"),
)


def write_resolved(path: str, config: RunConfig, world_size: int) -> None:
    """Write a DeepSpeed file with the run's values into the save root.

    Args:
        path: the file, or the word that holds it.
        config: what it was read into.
        world_size: processes of the job.

    Raises:
        CheckpointError: the save root cannot be written.
    """
    assert config.checkpoint.save is not None
    sizes = resolve(config, world_size)
    known = resolved_config(
        read_config(path),
        lambda section, field: getattr(getattr(config, section), field),
        (sizes.global_batch_size, sizes.micro_batch_size, sizes.num_microbatches),
    )
    try:
        text = json.dumps(known, indent=1) + "\n"
        Path(config.checkpoint.save, RESOLVED_NAME).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"--save: {RESOLVED_NAME} cannot be written: {error}") from error


def with_deepspeed(arguments: Arguments, world_size: int) -> Arguments:
    """The arguments with what their DeepSpeed file adds; disagreements are among the problems.

    Args:
        arguments: what was given; without a file they are returned as they are.
        world_size: processes of the job, for the batch triangle.
    """
    path = arguments.deepspeed
    if path is None:
        return arguments
    name = path if len(path) < 200 else "the DeepSpeed configuration"
    try:
        config = read_config(path)
    except ConfigError as error:
        unread = {name for name in _SUPPLIED if arguments.typed[name[0]].get(name[1]) is None}
        return dataclasses.replace(
            arguments,
            problems=(*arguments.problems, str(error)),
            malformed=arguments.malformed | unread,
        )
    translation = translate(
        config, lambda section, field: arguments.typed[section].get(field), world_size
    )
    typed = {section: dict(values) for section, values in arguments.typed.items()}
    sources = dict(arguments.sources)
    problems = [f"{name}: {problem}" for problem in translation.problems]
    for setting in translation.settings:
        given = arguments.typed[setting.section].get(setting.field)
        flag = spellings().get(setting.field, setting.field)
        if given is None:
            typed[setting.section][setting.field] = setting.value
            source = Source(DEEPSPEED, f"{setting.path} in {name}")
            sources[setting.section, setting.field] = source
        elif given != setting.value:
            problems.append(
                f"{name}: {setting.path} means {flag} {setting.value}, but "
                f"{arguments.source(setting.section, setting.field)} gives {given}; make them equal"
            )
    return dataclasses.replace(
        arguments,
        typed=typed,
        sources=sources,
        notes=(*arguments.notes, *(f"{name}: {note}" for note in translation.notes())),
        problems=(*arguments.problems, *problems),
        malformed=arguments.malformed | translation.unread,
    )
