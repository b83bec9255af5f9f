"""Sections of a configuration without the fields that are at fault.

So that rules about other fields tell what is wrong all the same: one report has everything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from mcore.config.command_line import flag_spellings, spelled_as_flags
from mcore.config.fields import AtFaultError, problems_of
from mcore.errors import McoreError

_Item = TypeVar("_Item")


def build_as_far_as_known(
    kind: type[Any], values: Mapping[str, Any], unknown: Collection[str] = ()
) -> tuple[Any, list[str]]:
    """A section, without the fields that are at fault, and what is wrong with them.

    Args:
        kind: class of the section.
        values: of its fields; absent ones have their default.
        unknown: fields whose value is needed or was given and is not known, which is told
            elsewhere.
    """
    try:
        if not unknown:
            return kind(**values), []
        section = without(kind, values, unknown)
        section.__post_init__()
    except (McoreError, ValueError) as error:
        problems = problems_of(error)
        return without(kind, values, {*unknown, *_at_fault(kind, problems)}), problems
    return section, []


def without(kind: type[Any], values: Mapping[str, Any], unknown: Collection[str]) -> Any:
    """A section of which some fields cannot be read: `AtFaultError` says so."""
    section = object.__new__(_partial(kind))
    for field in dataclasses.fields(kind):
        if field.name not in unknown:
            object.__setattr__(section, field.name, values.get(field.name, field.default))
    return section


def as_far_as_known(find: Callable[..., Iterable[_Item]], *sections: Any) -> Iterator[_Item]:
    """What a function finds in sections, up to where it reads a field at fault."""
    try:
        yield from find(*sections)
    except AtFaultError:
        return


def value_if_known(section: Any, field: str) -> Any:
    """The value of a field, or None where it is at fault."""
    try:
        return getattr(section, field)
    except AtFaultError:
        return None


def _at_fault(kind: type[Any], problems: Iterable[str]) -> set[str]:
    """The fields that problems are about: of each the one that it names first, or else all.

    In `A (5) must be divisible by B (2)` the values of both may be right, and so rules about B go
    on; A is left out, since its rules would say the same thing once more in other words.
    """
    flags = flag_spellings([kind])
    fields = {flag: name for name, flag in flags.items()}
    found: set[str] = set()
    for problem in problems:
        words = re.findall(r"--[\w-]+", spelled_as_flags(problem, flags))
        named = [fields[word] for word in words if word in fields]
        found.update(named[:1] or (field.name for field in dataclasses.fields(kind)))
    return found


def _partial(kind: type[Any]) -> type[Any]:
    names = {field.name for field in dataclasses.fields(kind)}

    def absent(self: object, name: str) -> Any:
        """Called where a field has no value."""
        del self
        raise AtFaultError(name) if name in names else AttributeError(name)

    return type(kind.__name__, (kind,), {"__slots__": (), "__getattr__": absent})
