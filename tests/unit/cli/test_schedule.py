from __future__ import annotations

import argparse
import json

import pytest

from mcore.cli import schedule
from mcore.errors import ConfigError


def run(capsys, *arguments):
    parser = argparse.ArgumentParser()
    schedule.register(parser.add_subparsers())
    args = parser.parse_args(["schedule", *arguments])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_table(capsys):
    out = run(capsys, "--pp", "2", "--microbatches", "2")
    assert "rank 0  F0.0 F0.1 .... .... B0.0 ---- .... B0.1 ----" in out
    assert "rank 1  .... F0.0 B0.0 ---- F0.1 B0.1 ---- .... ...." in out
    assert "step time            9 (ideal 6)" in out
    assert "bubble               33.33% of all rank-time" in out
    assert "peak activations     2 1 " in out


def test_json_alone(capsys):
    sizes = ["--pp", "4", "--microbatches", "8", "--vpp", "2"]
    record = json.loads(run(capsys, *sizes, "--cost-f", "2", "--cost-w", "3", "--json"))
    assert record["schedule"] == "interleaved-1f1b"
    assert record["bubble_over_ideal"] == pytest.approx(3 / 16)
    assert record["bubble"] == pytest.approx(3 / 19)
    assert record["ideal_time"] == 8 * 2 * (2 + 1 + 3)
    assert record["peak_activations"] == [11, 9, 7, 5]
    assert record["plans"][3][:6] == ["F0.0", "F0.1", "F0.2", "F0.3", "F1.0", "B1.0"]
    assert record["timeline"][0][0] == ["F0.0", 0.0, 2.0]


def test_sizes_that_do_not_fit(capsys):
    with pytest.raises(ConfigError, match="use interleaved-1f1b"):
        run(capsys, *["--pp", "2", "--microbatches", "2", "--vpp", "2", "--schedule", "1f1b"])
