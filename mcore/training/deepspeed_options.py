"""The options of a DeepSpeed file join those of the command line, with which they must agree."""

from __future__ import annotations

import dataclasses

from mcore.deepspeed import read_config, translate
from mcore.errors import ConfigError
from mcore.training.arguments import Arguments
from mcore.training.options import DEEPSPEED, Source, spellings


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
        return dataclasses.replace(arguments, problems=(*arguments.problems, str(error)))
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
    )
