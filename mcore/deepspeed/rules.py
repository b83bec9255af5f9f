"""Kinds of rules for a key of a DeepSpeed file, and the reading of plain values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mcore.deepspeed.translation import AUTO, Translation

_LARGEST = 2**63 - 1

Rule = Callable[[Translation, str, Any], None]
Reader = Callable[[Any], Any]


def boolean(value: Any) -> bool:
    """A truth value.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(value, bool):
        raise ValueError("use true or false")
    return value


def whole(value: Any) -> int:
    """A whole number, which DeepSpeed's files also write as 5e8.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("use a whole number")
    if not abs(value) <= _LARGEST or value != int(value):  # nor does it hold what is no number
        raise ValueError("use a whole number that 64 bits hold")
    return int(value)


def number(value: Any) -> float:
    """A number.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("use a number")
    if not abs(value) <= sys.float_info.max:
        raise ValueError("use a finite number")
    return float(value)


def option(section: str, name: str, read: Reader) -> Rule:
    """The key is an option of mcore."""

    def rule(translation: Translation, path: str, value: Any) -> None:
        try:
            translation.set(path, section, name, read(value))
        except ValueError as error:
            translation.refuse(path, value, str(error))
            if translation.given(section, name) is None:
                translation.unread.add((section, name))

    return rule


def only(*values: Any, otherwise: str) -> Rule:
    """These values are what mcore does; any other is refused."""

    def rule(translation: Translation, path: str, value: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in values):
            translation.refuse(path, value, otherwise)

    return rule


def unused(reason: str, *silent: Any) -> Rule:
    """The key changes no number; it is noted unless its value is what mcore does anyway."""

    def rule(translation: Translation, path: str, value: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in silent):
            translation.no_effect(path, reason)

    return rule


def refused(reason: str) -> Rule:
    """The key is refused with any value, but for a block that is switched off."""

    def rule(translation: Translation, path: str, value: Any) -> None:
        off = isinstance(value, dict) and value.get("enabled") is False
        if not off and value not in (None, False):
            shown = "{...}" if isinstance(value, dict) else value
            translation.refuse(path, shown, reason)

    return rule


def is_auto(value: Any) -> bool:
    """Whether a value is left to the command line."""
    return isinstance(value, str) and value == AUTO
