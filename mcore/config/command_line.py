"""Flags from configuration classes, and the strict parser that reads them.

Every program's flags are made here from the fields that `mcore.config.fields.flag` describes, so a
flag is spelled, typed and explained in one place.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from mcore.config.fields import Flag, flag_of
from mcore.errors import ConfigError

_Config = TypeVar("_Config")


class StrictParser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, knows no abbreviations, and suggests spellings.

    Args:
        refused: known flags of other programs that this one lacks -> what to do instead.
        **options: those of `argparse.ArgumentParser`.
    """

    def __init__(self, refused: Mapping[str, str] | None = None, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        self._refused = dict(refused or {})
        self._malformed: dict[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` in place of argparse's exit."""
        raise ConfigError(message)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse; nothing is left over, since argparse calls this for sub-commands too.

        Raises:
            ConfigError: unknown flags, each with the nearest known ones, or malformed values.
        """
        namespace, problems = self.collect(args, namespace)
        if problems:
            raise ConfigError("\n".join(problems))
        return namespace, []

    def collect(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as much as can be parsed; the second result is everything wrong with the rest."""
        self._malformed = {}
        try:
            namespace, unknown = super().parse_known_args(args, namespace)
        except ConfigError as error:
            return namespace or argparse.Namespace(), [*self._malformed.values(), str(error)]
        # The words after an unknown flag are its values as far as anybody can tell.
        flags = [word for word in unknown if word.startswith("--")] or unknown
        return namespace, [*self._malformed.values(), *map(self.explain, flags)]

    @property
    def malformed(self) -> frozenset[str]:
        """Where the values would go that the last `collect` could not read."""
        return frozenset(self._malformed)

    def spellings(self, words: Sequence[str]) -> dict[str, str]:
        """Where each typed flag goes in the namespace -> how it was typed."""
        typed = [word.split("=", 1)[0] for word in words]
        actions = self._option_string_actions
        return {actions[word].dest: word for word in typed if word in actions}

    def read_one(self, flag: str, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Read one known flag with its words, whatever else a command line would need."""
        self._malformed = {}
        action, namespace = self._option_string_actions[flag], argparse.Namespace()
        if self._match_argument(action, "A" * len(words)) != len(words):
            self._malformed.setdefault(action.dest, f"{flag} does not take {' '.join(words)!r}")
        value = self._get_values(action, words)
        if value is not argparse.SUPPRESS:
            action(self, namespace, value, flag)
        return namespace, list(self._malformed.values())

    def knows(self, flag: str) -> bool:
        """Whether there is a flag of this spelling."""
        return flag in self._option_string_actions

    def is_switch(self, flag: str) -> bool:
        """Whether a known flag takes no value."""
        return self._option_string_actions[flag].nargs == 0

    def explain(self, flag: str) -> str:
        """Why a flag is unknown or refused, and what to do instead."""
        name = flag.split("=", 1)[0]
        if name in self._refused:
            return f"{name} is not available: {self._refused[name]}"
        kind = "flag" if flag.startswith("-") else "argument"
        return f"unknown {kind} {flag!r}" + did_you_mean(name, self._option_string_actions)

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._malformed[action.dest] = str(error)
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.dest in self._malformed:
            return argparse.SUPPRESS  # so that nothing is stored
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._malformed[action.dest] = str(error)
            return argparse.SUPPRESS


def did_you_mean(word: str, known: Collection[str]) -> str:
    """`; did you mean X?`: what a word abbreviates, or else the nearest known one, or nothing."""
    whole = [name for name in known if len(word) > 2 and name.startswith(word)][:3]
    hints = whole or difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {' or '.join(hints)}?" if hints else ""


def add_flags(
    group: argparse.ArgumentParser | argparse._ArgumentGroup,
    config_class: type[Any],
    *,
    omit: Collection[str] = (),
    prefix: str = "",
    may_lack_required: bool = False,
) -> None:
    """Add the flag of every described field that is not hidden.

    A flag that is not typed leaves nothing in the namespace: the default is the field's own.

    Args:
        group: where the flags go.
        config_class: a dataclass whose fields are made by `mcore.config.fields.flag`.
        omit: names of fields that have no effect in this program, and so get no flag.
        prefix: put before the field's name to make the name in the namespace.
        may_lack_required: required fields may come from elsewhere; the program sees to it.
    """
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        described = flag_of(field)
        if described is not None and not described.hidden and field.name not in omit:
            names, options = _flag_options(field, described, hints[field.name])
            options["required"] = described.required and not may_lack_required
            options.update(dest=prefix + field.name, default=argparse.SUPPRESS)
            group.add_argument(*names, **options)


def take_config(config_class: type[_Config], namespace: argparse.Namespace) -> _Config:
    """The configuration that the flags of `add_flags` describe; what was not typed is default."""
    values = vars(namespace)
    names = [field.name for field in dataclasses.fields(config_class)]  # type: ignore[arg-type]
    return config_class(**{name: values[name] for name in names if name in values})


def flag_names(field: dataclasses.Field[Any], described: Flag) -> list[str]:
    """The spellings of a field's flag, the usual one first."""
    spelling = described.name or "--" + field.name.replace("_", "-")
    if field.default is True:
        stem = spelling.removeprefix("--")
        return [f"--no-{stem}", f"--disable-{stem}"]
    return [spelling, *described.aliases]


def flag_spellings(config_classes: Iterable[type[Any]]) -> dict[str, str]:
    """Field -> its flag, of every field that has one."""
    return {
        field.name: flag_names(field, described)[0]
        for config_class in config_classes
        for field in dataclasses.fields(config_class)
        if (described := flag_of(field)) is not None and not described.hidden
    }


def spelled_as_flags(text: str, flags: Mapping[str, str]) -> str:
    """A message about fields as one about the flags that a user types.

    A name of one word is surely a field only where it begins the message or stands in backticks.

    Args:
        text: the message.
        flags: field -> flag, of `flag_spellings`.
    """

    def respell(match: re.Match[str]) -> str:
        name = match["name"] or match["quoted"]
        is_field = "_" in name or match["quoted"] is not None or match.start() == 0
        return flags[name] if is_field and name in flags else match[0]

    return re.sub(r"(?<![\w/.-])(?:(?P<name>[a-z]\w*)(?![\w/-])|`(?P<quoted>\w+)`)", respell, text)


def _flag_options(
    field: dataclasses.Field[Any], described: Flag, hint: Any
) -> tuple[list[str], dict[str, Any]]:
    """Spellings and `add_argument`'s options for bool, X, X | None, tuple[X, ...], Literal."""
    names = flag_names(field, described)
    if hint is bool:
        if field.default is True:
            return names, {"action": "store_false", "help": f"Switch off: {_help(described.help)}"}
        return names, {"action": "store_true", "help": _help(described.help)}
    options: dict[str, Any] = {"help": _help(described.help + default_text(field))}
    kind = _strip_optional(hint)
    if get_origin(kind) is tuple:
        options["nargs"], options["action"], kind = "+", _Tuple, get_args(kind)[0]
    if get_origin(kind) is Literal:
        options["choices"] = list(get_args(kind))
        kind = functools.partial(_one_of, get_args(kind))
    elif described.metavar is None:
        options["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
    if described.metavar is not None:
        options["metavar"] = described.metavar
    return names, options | {"type": kind}


def _one_of(choices: tuple[Any, ...], word: str) -> Any:
    """The choice that a word means in small or capital letters; argparse refuses what is left."""
    return next((choice for choice in choices if str(choice).lower() == word.lower()), word)


class _Tuple(argparse.Action):
    """Stores several words as a tuple, since configurations are immutable."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        setattr(namespace, self.dest, tuple(values))


def default_text(field: dataclasses.Field[Any]) -> str:
    """`` Default: X.`` where the field has a default that says something."""
    default = field.default
    if default is dataclasses.MISSING or default is None or isinstance(default, bool):
        return ""
    words = " ".join(map(str, default)) if isinstance(default, tuple) else default
    return f" Default: {words}."


def _help(text: str) -> str:
    return text.replace("%", "%%")


def _strip_optional(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(arg for arg in get_args(hint) if arg is not type(None))
    return hint
