"""How a configuration field describes its command-line flag.

A dataclass field is the single source of a flag: name, type, default, choices and help. The command
line (`training/arguments.py`) and the flags page are generated from these descriptions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mcore.errors import ConfigError, OptionsError

METADATA_KEY = "flag"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """What the command line knows about a field.

    Attributes:
        help: one or two sentences, with units.
        name: the flag's spelling; None = `--` + the field's name with dashes. A field that is True
            by default is switched off by `--no-NAME` (give the positive name here).
        aliases: further spellings that mean the same, accepted without a word.
        required: the command line must give it.
        hidden: a field that no flag sets (derived, or only from Python).
        metavar: how the value is shown in the help.
        model: the value defines the model and travels with a checkpoint (`--use-checkpoint-args`).
    """

    help: str
    name: str | None = None
    aliases: tuple[str, ...] = ()
    required: bool = False
    hidden: bool = False
    metavar: str | None = None
    model: bool = False


class AtFaultError(Exception):
    """A rule read a field whose value is at fault or not known, which is told elsewhere.

    See `mcore.config.partial`.
    """


def flag(default: Any = dataclasses.MISSING, *, help: str, **options: Any) -> Any:
    """A dataclass field with its command-line description.

    Args:
        default: the value when the flag is absent; omitted = no default (the field is required).
        help: one or two sentences, with units.
        **options: the other attributes of `Flag`.
    """
    metadata = {METADATA_KEY: Flag(help=help, **options)}
    if isinstance(default, (list, dict)):
        raise TypeError("a flag's default must be immutable: use a tuple or None")
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(field: dataclasses.Field[Any]) -> Flag | None:
    """The command-line description of a dataclass field, or None where it has none."""
    return field.metadata.get(METADATA_KEY)


def refuse(problems: Iterable[str]) -> None:
    """Raise one error with everything that is wrong, if anything is.

    Raises:
        ConfigError: one problem.
        OptionsError: several.
    """
    found = []
    try:
        for problem in problems:
            found.append(problem)
    except ConfigError as error:
        found += problems_of(error)
    except AtFaultError:
        pass  # of the rules that follow nothing can be told
    if len(found) == 1:
        raise ConfigError(found[0])
    if found:
        raise OptionsError(found)


def problems_of(error: Exception) -> list[str]:
    """The problems that an error tells, one by one."""
    return list(error.problems) if isinstance(error, OptionsError) else [str(error)]


def below(config: Any, least: float, *names: str) -> Iterator[str]:
    """A problem for each field that is set and lies below a bound."""
    for name in names:
        try:
            value = getattr(config, name)
        except AtFaultError:
            continue
        if value is not None and value < least:
            kind = "a whole number" if isinstance(least, int) else "a number"
            yield f"`{name}` is {value}; use {kind} from {least} up"


def not_one_of(value: Any, choices: Sequence[Any], name: str) -> Iterator[str]:
    """A problem where the value is none of the choices."""
    if value not in choices:
        yield f"`{name}` is {value!r}; use one of {', '.join(map(str, choices))}"


def choose(value: Any, choices: Sequence[Any], name: str) -> None:
    """Raise `ValueError` unless value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(str, choices))}")
