"""Options in a YAML file (`--config FILE`): what the command line may say, by the same names.

A key is a flag without its dashes in front (`hidden-size`, or `hidden_size`), an old or foreign
spelling, or a field's name; keys may stand under the name of their section (`model:`), which is how
`mcore check --json` writes them. Everything is read by the parser of the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mcore.config.command_line import StrictParser, did_you_mean, flag_names
from mcore.config.fields import flag_of
from mcore.errors import ConfigError
from mcore.training.options import CONFIG_FILE, Options, Source, sections

_TAG = "tag:yaml.org,2002:"


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A key with its value.

    Attributes:
        section: the section that it stands under, or None.
        key: as written.
        value: its node.
        where: file and line.
    """

    section: str | None
    key: str
    value: yaml.Node
    where: str


def read_option_file(path: str, parser: StrictParser) -> Options:
    """Read options from a YAML file; what is wrong is in their `problems`, with its line.

    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping.
    """
    options = Options()
    seen: dict[str, str] = {}
    for entry in _entries(path, options.problems):
        flag = _flag(entry, parser)
        if flag is None:
            options.problems.append(f"{entry.where}: {_unknown(entry, parser)}")
            continue
        if flag in seen:
            options.problems.append(f"{entry.where}: {entry.key} stands in {seen[flag]} already")
        seen[flag] = entry.where
        _take(entry, flag, parser, options)
    return options


def _entries(path: str, problems: list[str]) -> Iterator[_Entry]:
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path} must hold `flag: value` lines")
    for key, value in root.value:
        where = f"{path} line {key.start_mark.line + 1}"
        if not isinstance(value, yaml.MappingNode):
            yield _Entry(None, str(key.value), value, where)
        elif key.value not in sections():
            problems.append(
                f"{where}: {key.value!r} is no section"
                f"{did_you_mean(str(key.value), sections())} (sections: {', '.join(sections())})"
            )
        else:
            for inner, inner_value in value.value:
                line = f"{path} line {inner.start_mark.line + 1}"
                yield _Entry(key.value, str(inner.value), inner_value, line)


def _flag(entry: _Entry, parser: StrictParser) -> str | None:
    """The flag that a key means; of a field that is on by default, the one that turns it off."""
    spelled = _fields().get(entry.key.replace("-", "_"))
    if spelled is not None:
        return spelled[2] if entry.section in (None, spelled[0]) else None
    for flag in (f"--{entry.key}", "--" + entry.key.replace("_", "-")):
        if parser.knows(flag) and not flag.startswith(("--help", "--config")):
            return flag
    return None


def _unknown(entry: _Entry, parser: StrictParser) -> str:
    spelled = _fields().get(entry.key.replace("-", "_"))
    if spelled is not None:
        return f"{entry.key} belongs to {spelled[0]}, not to {entry.section}"
    return parser.explain("--" + entry.key.replace("_", "-"))


def _take(entry: _Entry, flag: str, parser: StrictParser, options: Options) -> None:
    value, source = entry.value, Source(CONFIG_FILE, entry.where)
    tag = value.tag.removeprefix(_TAG)
    if tag == "null":
        return
    if isinstance(value, yaml.SequenceNode):
        words = [str(item.value) for item in value.value]
    else:
        words = [str(value.value)]
    if parser.is_switch(flag):
        if tag != "bool":
            options.problems.append(f"{entry.where}: {entry.key} is a switch: write true or false")
            return
        spelled = _fields().get(entry.key.replace("-", "_"))
        on = yaml.SafeLoader.bool_values[str(value.value).lower()]
        if spelled is not None:
            options.set(spelled[0], spelled[1], on, source)
            return
        if not on:
            return
        words = []
    elif tag == "bool":
        options.problems.append(f"{entry.where}: {entry.key} takes a value, not {value.value}")
        return
    namespace, problems = parser.read_one(flag, words)
    options.problems += [f"{entry.where}: {problem}" for problem in problems]
    values = vars(namespace)
    options.take(values, dict.fromkeys(values, source))


@functools.cache
def _fields() -> dict[str, tuple[str, str, str]]:
    """Name of a field, or its flag without dashes -> (section, field, its flag)."""
    names = {}
    for section, kind in sections().items():
        for field in dataclasses.fields(typing.cast(Any, kind)):
            described = flag_of(field)
            if described is None or described.hidden:
                continue
            for name in (field.name, described.name or field.name):
                key = name.removeprefix("--").replace("-", "_")
                names[key] = (section, field.name, flag_names(field, described)[0])
    return names
