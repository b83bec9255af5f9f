"""Options that were given, by section and field, with where each came from."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from mcore.config.command_line import flag_spellings
from mcore.config.run import RunConfig
from mcore.errors import ConfigError
from mcore.training.legacy_flag import LegacyFlag
from mcore.training.legacy_flags import LEGACY

COMMAND_LINE = "command line"
CONFIG_FILE = "configuration file"
DEEPSPEED = "DeepSpeed JSON"
CHECKPOINT = "checkpoint"
DEFAULT = "default"

#: Section of a namespace in which flags that name files of options are.
FILES = "files"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from.

    Attributes:
        kind: COMMAND_LINE, CONFIG_FILE, DEEPSPEED, CHECKPOINT or DEFAULT.
        spelled: how it was written there: a flag, a line of a file, or a path of keys.
    """

    kind: str
    spelled: str

    def __str__(self) -> str:
        return self.spelled if self.kind == COMMAND_LINE else f"{self.spelled} ({self.kind})"


@functools.cache
def sections() -> dict[str, type]:
    """Section name -> configuration class, in the order of the tree."""
    hints = typing.get_type_hints(RunConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(RunConfig)}


@functools.cache
def spellings() -> dict[str, str]:
    """Field -> flag, of every field of every section."""
    return flag_spellings(sections().values())


@dataclasses.dataclass(slots=True)
class Options:
    """What one place (command line, file) gives.

    Attributes:
        typed: section -> field -> value.
        sources: (section, field) -> where the value came from.
        legacy: other spellings that were used.
        notes: what to say about them.
        problems: everything wrong, in words.
        extra: values of a program's own arguments.
        files: files that hold more options.
    """

    typed: dict[str, dict[str, Any]] = dataclasses.field(
        default_factory=lambda: {name: {} for name in sections()}
    )
    sources: dict[tuple[str, str], Source] = dataclasses.field(default_factory=dict)
    legacy: set[str] = dataclasses.field(default_factory=set)
    notes: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[str, Any] = dataclasses.field(default_factory=dict)

    def set(self, section: str, field: str, value: Any, source: Source) -> None:
        """Take a value."""
        self.typed[section][field] = value
        self.sources[section, field] = source

    def take(self, values: Mapping[str, Any], sources: Mapping[str, Source]) -> None:
        """Take what a parser read.

        Args:
            values: destination of the parser -> value.
            sources: destination -> where it was written.
        """
        legacy: list[tuple[LegacyFlag, Any, Source]] = []
        for destination, value in values.items():
            section, _, field = destination.partition(".")
            if section in self.typed and field:
                self.set(section, field, value, sources[destination])
            elif section == "legacy":
                legacy.append((LEGACY[field], value, sources[destination]))
            elif section == FILES:
                self.files[field] = value
            else:
                self.extra[destination] = value
        # One that yields to a typed value comes after those that type it.
        for item, value, source in sorted(legacy, key=lambda entry: bool(entry[0].yields)):
            self._take_legacy(item, value, source)

    def over(self, weaker: Options) -> Options:
        """These options, and those of a weaker place where these say nothing."""
        joined = Options()
        for options in (weaker, self):
            for section, values in options.typed.items():
                joined.typed[section].update(values)
            joined.sources.update(options.sources)
            joined.legacy |= options.legacy
            joined.notes += options.notes
            joined.problems += options.problems
            joined.extra.update(options.extra)
            joined.files.update(options.files)
        return joined

    def _take_legacy(self, item: LegacyFlag, value: Any, source: Source) -> None:
        self.legacy.add(item.flag)
        try:
            settings = item.settings(value)
        except ConfigError as error:
            self.problems.append(str(error))
            return
        for (section, field), wanted in settings.items():
            already = self.typed[section].get(field, wanted)
            if field in item.yields:
                wanted = already
            if already != wanted:
                other = self.sources[section, field]
                self.problems.append(
                    f"{source} means {spellings()[field]} {wanted}, but {other} gives {already}; "
                    "give one of the two"
                )
                continue
            if field not in self.typed[section]:
                self.set(section, field, wanted, source)
        if item.note is not None:
            self.notes.append(item.note)
