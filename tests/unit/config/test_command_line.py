"""Flags from fields: spellings, types, defaults, and what the strict parser refuses."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from mcore.config.command_line import StrictParser, add_flags, take_config
from mcore.config.fields import flag
from mcore.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    size: int = flag(1, help="Size in %.")
    rate: float | None = flag(None, name="--learning-rate", aliases=("--lr",), help="Rate.")
    paths: tuple[str, ...] = flag(("a", "b"), help="Paths.", metavar="P")
    kind: Literal["x", "y"] | None = flag(None, help="Kind.")
    fuse: bool = flag(True, name="--fusion", help="Fuse.")
    check: bool = flag(False, help="Check.")
    secret: int = flag(7, hidden=True, help="No flag.")
    needed: str = flag(help="Needed.", required=True)


def parse(*words, **options):
    parser = StrictParser(**options)
    add_flags(parser, Options)
    return take_config(Options, parser.parse_args(["--needed", "n", *words]))


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ([], {}),
        (["--size", "5"], {"size": 5}),
        (["--lr", "1e-3"], {"rate": 1e-3}),
        (["--learning-rate=2"], {"rate": 2.0}),
        (["--paths", "c", "d"], {"paths": ("c", "d")}),
        (["--kind", "y"], {"kind": "y"}),
        (["--no-fusion"], {"fuse": False}),
        (["--disable-fusion"], {"fuse": False}),
        (["--check"], {"check": True}),
    ],
)
def test_typed_flags_change_fields(words, changed):
    assert parse(*words) == Options(needed="n", **changed)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--siz", "5"], r"unknown flag '--siz'; did you mean --size\?"),
        (["--chekc"], r"unknown flag '--chekc'; did you mean --check\?"),
        (["--secret", "1"], "unknown flag '--secret'"),
        (["--old"], "--old is not available: use --size"),
        (["stray"], "unknown argument 'stray'"),
        (["--kind", "z"], "invalid choice: 'z'"),
        (["--size", "many"], "invalid int value: 'many'"),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(*words, refused={"--old": "use --size"})


def test_a_required_flag():
    parser = StrictParser()
    add_flags(parser, Options)
    with pytest.raises(ConfigError, match="--needed"):
        parser.parse_args([])


def test_help_tells_defaults(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--size N Size in %. Default: 1." in shown
    assert "--paths P [P ...] Paths. Default: a b." in shown
    assert "Switch off: Fuse." in shown


def test_sub_commands_are_as_strict():
    parser = StrictParser()
    add_flags(parser.add_subparsers().add_parser("run"), Options)
    with pytest.raises(ConfigError, match="did you mean --check"):
        parser.parse_args(["run", "--needed", "n", "--chec"])
