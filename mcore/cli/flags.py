"""Flags of one configuration class on a sub-command's parser, and the way back."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Collection
from typing import Any, Literal, TypeVar

from mcore.config.fields import flag_of

_Config = TypeVar("_Config")


def add_flags(
    parser: argparse.ArgumentParser,
    config_class: type[Any],
    omit: Collection[str] = (),
) -> None:
    """Add a flag for every described field.

    Args:
        parser: where the flags go, in a group of their own.
        config_class: a dataclass whose fields are made by `mcore.config.fields.flag`.
        omit: names of fields that have no effect in this command, and so get no flag.
    """
    group = parser.add_argument_group(config_class.__name__.removesuffix("Config").lower())
    types = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        described = flag_of(field)
        if described is None or described.hidden or field.name in omit:
            continue
        options = _value_options(types[field.name], described.metavar)
        spelling = field.name.replace("_", "-")
        if types[field.name] is bool:
            options = {"action": "store_false" if field.default else "store_true"}
            spelling = "no-" + spelling if field.default else spelling
        if described.required:
            options["required"] = True
        else:
            options["default"] = field.default
        group.add_argument(
            described.name or "--" + spelling,
            *described.aliases,
            dest=field.name,
            help=described.help,
            **options,
        )


def take_config(config_class: type[_Config], namespace: argparse.Namespace) -> _Config:
    """The configuration that the flags of `add_flags` describe; omitted fields keep defaults."""
    values = vars(namespace)
    known = [field.name for field in dataclasses.fields(config_class) if field.name in values]  # type: ignore[arg-type]
    chosen = {name: values[name] for name in known}
    return config_class(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in chosen.items()
        }
    )


def _value_options(kind: Any, metavar: str | None) -> dict[str, Any]:
    """What `add_argument` needs for a type: `X`, `X | None`, `tuple[X, ...]` or a Literal."""
    alternatives = (kind, *typing.get_args(kind))
    for alternative in alternatives:
        if typing.get_origin(alternative) is Literal:
            return {"choices": typing.get_args(alternative)}
    repeated = any(typing.get_origin(alternative) is tuple for alternative in alternatives)
    item = next((number for number in (int, float) if number in alternatives), str)
    return {"type": item, "metavar": metavar} | ({"nargs": "+"} if repeated else {})
