"""What a spelling of another program or another year means here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore.errors import ConfigError

Settings = Mapping[tuple[str, str], Any]

SWITCH: Mapping[str, Any] = {"action": "store_true"}
NUMBER: Mapping[str, Any] = {"type": int, "metavar": "N"}
REAL: Mapping[str, Any] = {"type": float, "metavar": "X"}
WORD: Mapping[str, Any] = {"type": str, "metavar": "TEXT"}


def nothing(value: Any) -> Settings:
    """Set no option."""
    del value
    return {}


@dataclass(frozen=True, slots=True)
class LegacyFlag:
    """One old or foreign flag.

    Attributes:
        flag: as typed.
        help: one line.
        sets: from the typed value to (section, field) -> value.
        note: said once when the flag is used; None = an equal spelling, nothing to say.
        options: how argparse reads it.
        yields: fields of which a typed value wins without a word.
        only: the values that mean something here; None = all.
        otherwise: why another value is refused, and what to do instead.
    """

    flag: str
    help: str
    sets: Callable[[Any], Settings] = nothing
    note: str | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: SWITCH)
    yields: tuple[str, ...] = ()
    only: tuple[Any, ...] | None = None
    otherwise: str = ""

    def settings(self, value: Any) -> Settings:
        """What the flag with this value sets.

        Raises:
            ConfigError: a value that means nothing here.
        """
        if self.only is not None and value not in self.only:
            allowed = ", ".join(map(str, self.only))
            raise ConfigError(
                f"{self.flag} {value} is not available: {self.otherwise} (it takes {allowed} here)"
            )
        return self.sets(value)


def to(section: str, name: str) -> Callable[[Any], Settings]:
    """Set one field to the typed value."""
    return lambda value: {(section, name): value}


def fixed(section: str, name: str, value: Any) -> Callable[[Any], Settings]:
    """Set one field to a value, whatever is typed."""
    return lambda _: {(section, name): value}


def alias(flag: str, section: str, name: str, new: str, options: Mapping[str, Any]) -> LegacyFlag:
    """Another name of a flag; it says so when it is used."""
    help_, note = f"Another name of {new}.", f"{flag} is another name: it sets {new}"
    return LegacyFlag(flag, help_, to(section, name), note, options)


def no_effect(flag: str, why: str, options: Mapping[str, Any] = SWITCH) -> LegacyFlag:
    """A flag that is accepted so that scripts run, and says why it does nothing."""
    return LegacyFlag(flag, f"No effect: {why}.", nothing, f"{flag} has no effect: {why}", options)


def by_name(flags: tuple[LegacyFlag, ...]) -> dict[str, LegacyFlag]:
    """The flags by the name that they have in a namespace."""
    return {item.flag.strip("-").replace("-", "_"): item for item in flags}
