"""`mcore ranks`."""

import argparse
import json
from pathlib import Path

import pytest

from mcore.cli import ranks
from mcore.errors import TopologyError

TABLES = json.loads((Path(__file__).parents[2] / "golden" / "rank_groups.json").read_text())


def _run(*argv):
    parser = argparse.ArgumentParser()
    ranks.register(parser.add_subparsers())
    args = parser.parse_args(["ranks", *argv])
    return args.run(args)


def _flags(case):
    sizes = [text for axis in ("tp", "pp", "cp", "dp") for text in (f"--{axis}", str(case[axis]))]
    return [*sizes, "--order", case["order"]]


def test_json_is_megatrons_table(capsys):
    for case in TABLES:
        assert _run(*_flags(case), "--json") == 0
        groups = json.loads(capsys.readouterr().out)
        assert set(groups) == {
            "tp",
            "pp",
            "cp",
            "dp",
            "dp-cp",
            "tp-pp",
            "tp-cp",
            "tp-dp-cp",
            "embedding",
            "position-embedding",
        }
        for name, expected in case["groups"].items():
            assert groups[name] == expected


def test_table_for_people(capsys):
    assert _run("--tp", "2", "--pp", "2") == 0
    out = capsys.readouterr().out
    assert out.startswith("4 ranks, order tp-cp-dp-pp")
    assert "tp                 [0,1] [2,3]" in out
    assert "pp                 [0,2] [1,3]" in out


def test_a_wrong_order_is_refused_by_name():
    with pytest.raises(TopologyError, match="leaves out pp"):
        _run("--pp", "2", "--order", "tp-dp")
