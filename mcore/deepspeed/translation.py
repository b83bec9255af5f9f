"""What a DeepSpeed file means: values of options, notes, and everything that is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Leaves a value to the command line, or to what follows from it.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """An option that the file gives.

    Attributes:
        section: section of the configuration.
        field: field in it.
        value: its value.
        path: the keys that say so, joined by dots.
    """

    section: str
    field: str
    value: Any
    path: str


@dataclass(slots=True)
class Translation:
    """Collects what a file means.

    Attributes:
        given: (section, field) -> the value that the command line gives, None where it does not.
        settings: what the file gives.
        problems: what is refused, by path.
        without_effect: reason -> paths of keys that have no effect here.
        left_open: what the file does not say although DeepSpeed has another default for it.
        unread: (section, field) of options that the file gives, and what it gives is refused.
    """

    given: Callable[[str, str], Any]
    settings: list[Setting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_effect: dict[str, list[str]] = field(default_factory=dict)
    left_open: list[str] = field(default_factory=list)
    unread: set[tuple[str, str]] = field(default_factory=set)

    def set(self, path: str, section: str, name: str, value: Any) -> None:
        """Take a value, unless other keys give another one."""
        for other in self.settings:
            if (other.section, other.field) == (section, name):
                if other.value != value:
                    self.problems.append(
                        f"{other.path} says {other.value!r} and {path} says {value!r}, which are "
                        "one option here; make them equal"
                    )
                return
        self.settings.append(Setting(section, name, value, path))

    def value(self, section: str, name: str) -> Any:
        """The value of an option so far, from the command line or from the file, or None."""
        for setting in self.settings:
            if (setting.section, setting.field) == (section, name):
                return setting.value
        return self.given(section, name)

    def refuse(self, path: str, value: Any, reason: str) -> None:
        """Refuse a key with its value."""
        self.problems.append(f"{path} ({value!r}): {reason}")

    def no_effect(self, path: str, reason: str) -> None:
        """Note that a key does nothing here."""
        self.without_effect.setdefault(reason, []).append(path)

    def open(self, path: str, section: str, name: str, theirs: str, flag: str) -> None:
        """Note that a default of mcore holds where DeepSpeed's is another."""
        if self.value(section, name) is None:
            self.left_open.append(
                f"{path} is not given: the default of {flag} holds, not DeepSpeed's ({theirs})"
            )

    def notes(self) -> list[str]:
        """What to tell the user."""
        lines = [
            f"{', '.join(paths)}: no effect, {reason}"
            for reason, paths in self.without_effect.items()
        ]
        return [*lines, *self.left_open]
