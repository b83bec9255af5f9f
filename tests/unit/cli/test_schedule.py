from __future__ import annotations

import argparse
import codecs
import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageFont

from mcore.cli import schedule
from mcore.errors import ConfigError, ScheduleError


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


def test_zero_bubble(capsys):
    sizes = ["--pp", "4", "--microbatches", "8"]
    out = run(capsys, *sizes, "--vpp", "2", "--schedule", "zb-v")
    assert "step time            51 (ideal 48)" in out
    assert "bubble               5.88% of all rank-time" in out
    assert "peak activations     8 8 8 8 " in out
    assert run(capsys, *sizes, "--schedule", "zb-v") == out
    record = json.loads(run(capsys, *sizes, "--schedule", "bounded", "--json"))
    assert record["peak_activations"] == [2, 2, 2, 1]


def test_comparison(capsys):
    sizes = ["--pp", "4", "--microbatches", "8", "--compare"]
    out = run(capsys, *sizes, "--cost-f", "2", "--cost-b", "2", "--cost-w", "2")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[3:] if line}
    assert {name: float(row[1]) for name, row in rows.items()} == {
        "gpipe": 66,
        "1f1b": 66,
        "interleaved-1f1b": 57,
        "bounded": 102,
        "zb-h1": 54,
        "zb-v": 51,
    }
    assert rows["interleaved-1f1b"][4:] == ["5.5", "4.5", "3.5", "2.5"]
    records = json.loads(run(capsys, *sizes, "--json"))
    assert [record["schedule"] for record in records] == list(rows)


def test_files(capsys, tmp_path):
    good = tmp_path / "good.csv"
    good.write_text("F0.0,F0.1,B0.0,B0.1\nF0.0,B0.0,F0.1,B0.1\n")
    out = run(capsys, "--schedule", f"file:{good}")
    assert "rank 0  F0.0 F0.1 .... .... B0.0 ---- .... B0.1 ----" in out
    with pytest.raises(ConfigError, match=r"good\.csv is a schedule for 2 microbatches, and 3"):
        run(capsys, "--schedule", f"file:{good}", "--microbatches", "3")
    good.write_bytes(codecs.BOM_UTF8 + good.read_bytes())
    assert run(capsys, "--schedule", f"file:{good}") == out
    bad = tmp_path / "bad.txt"
    bad.write_text("F0.0 B0.0 F0.1 B0.1\nF0.0 F0.1 B0.0 B0.1\n")
    with pytest.raises(ScheduleError, match=r"rank 0, action B0\.0: deadlock"):
        run(capsys, "--schedule", f"file:{bad}")


def test_no_action_vanishes_from_the_table(capsys):
    sizes = ["--pp", "2", "--microbatches", "2"]
    for costs in (["--cost-comm", "0.5"], ["--cost-w", "0"], ["--cost-f", "0.3", "--cost-b", "2"]):
        out = run(capsys, *sizes, *costs)
        for action in ("F0.0", "F0.1", "B0.0", "B0.1"):
            assert len(re.findall(rf"rank \d .*{action}", out)) == 2


def test_the_picture_of_the_page_is_the_one_that_is_drawn(capsys, tmp_path):
    drawn = tmp_path / "schedules.svg"
    run(capsys, "--pp", "4", "--microbatches", "8", "--compare", "--plot", str(drawn))
    shown = Path(__file__).parents[3] / "docs" / "pictures" / "schedules.svg"
    assert drawn.read_text() == shown.read_text()


@pytest.mark.parametrize("options", [["--schedule", "zb-v"], ["--compare"]])
def test_pictures(capsys, tmp_path, options):
    sizes = ["--pp", "4", "--microbatches", "8"]
    for ending in ("svg", "png"):
        picture = tmp_path / f"timeline.{ending}"
        assert f"drawn in {picture}" in run(capsys, *sizes, *options, "--plot", str(picture))
    root = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    boxes = root.findall("{*}rect")
    texts = [text.text for text in root.findall("{*}text")]
    drawn = 4 * (8 * 6 if options[0] == "--schedule" else 8 * (2 + 2 + 4 + 2 + 3 + 6))
    assert len(boxes) > drawn
    assert sum(text.isdigit() for text in texts) >= drawn
    assert "rank 3" in texts
    with Image.open(tmp_path / "timeline.png") as image:
        assert image.width == 2 * int(root.get("width"))
        assert len(image.getcolors(1 << 20)) > 6


@pytest.mark.parametrize(
    "sizes",
    ["--pp 1 --microbatches 1", "--pp 2 --microbatches 3", "--pp 2 --microbatches 1 --compare"],
)
def test_small_pictures_are_whole(capsys, tmp_path, sizes):
    """No text runs over the edge or into its neighbour; the folder is made, in capitals too."""
    drawn = tmp_path / "new" / "folder" / "TIMELINE.SVG"
    run(capsys, *sizes.split(), "--plot", str(drawn))
    root = ElementTree.parse(drawn).getroot()
    font = {size: ImageFont.load_default(size) for size in (12, 15)}
    lines = defaultdict(list)
    for text in root.findall("{*}text"):
        length = font[int(text.get("font-size"))].getlength(text.text)
        before = {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor")]
        start = float(text.get("x")) - before
        assert start >= 0, text.text
        assert start + length <= int(root.get("width")) - 5, text.text
        lines[text.get("y")].append((start, start + length))
    for ends in lines.values():
        for (_, end), (start, _) in pairwise(sorted(ends)):
            assert start > end + 1


def test_the_default_is_what_training_would_choose(capsys):
    for flags, name in (
        ("", "1f1b"),
        ("--vpp 2", "interleaved-1f1b"),
        ("--max-in-flight-microbatches 1", "bounded"),
    ):
        record = json.loads(run(capsys, *f"--pp 2 --microbatches 4 {flags} --json".split()))
        assert record["schedule"] == name


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "bounded"])
def test_what_is_printed_as_a_file_is_the_same_schedule(capsys, tmp_path, name):
    sizes = ["--pp", "3", "--microbatches", "5"]
    path = tmp_path / "plans.txt"
    path.write_text(run(capsys, *sizes, "--schedule", name, "--plans"))
    wanted = json.loads(run(capsys, *sizes, "--schedule", name, "--json"))
    got = json.loads(run(capsys, "--schedule", f"file:{path}", "--json"))
    assert {**got, "schedule": name} == wanted
    if name == "zb-v":
        path.write_text(path.read_text().replace("placement: v", "placement: usual"))
        with pytest.raises(ScheduleError, match="with a line `placement: v` in the file it would"):
            run(capsys, "--schedule", f"file:{path}")
    with pytest.raises(ConfigError, match="--plans prints one schedule"):
        run(capsys, *sizes, "--compare", "--plans")


def test_what_does_not_fit(capsys, tmp_path):
    sizes = ["--pp", "2", "--microbatches", "2"]
    with pytest.raises(ConfigError, match="use interleaved-1f1b"):
        run(capsys, *sizes, "--vpp", "2", "--schedule", "1f1b")
    for flag in ("--pp", "--vpp", "--group", "--max-in-flight-microbatches"):
        with pytest.raises(ConfigError, match=f"{flag} is 0; give a whole number from 1 up"):
            run(capsys, *sizes, flag, "0")
    empty = tmp_path / "empty.txt"
    empty.write_text("# nothing\n")
    with pytest.raises(ScheduleError, match=r"empty\.txt: there are no actions in it"):
        run(capsys, "--schedule", f"file:{empty}")
    with pytest.raises(ConfigError, match="use one of gpipe, 1f1b"):
        run(capsys, *sizes, "--schedule", "magic")
    with pytest.raises(ConfigError, match="missing: --pp, --microbatches"):
        run(capsys)
    with pytest.raises(ConfigError, match="--compare shows every schedule: drop --schedule zb-h1"):
        run(capsys, *sizes, "--compare", "--schedule", "zb-h1")
    for cost in (["--cost-f", "0"], ["--cost-w", "-1"], ["--cost-comm", "nan"]):
        with pytest.raises(ConfigError, match="costs are times|must take some time"):
            run(capsys, *sizes, *cost)
    with pytest.raises(ConfigError, match="cannot be read"):
        run(capsys, "--schedule", f"file:{tmp_path}/none.csv")
    with pytest.raises(ConfigError, match=r"--plot .*empty\.txt/a\.svg cannot be written"):
        run(capsys, *sizes, "--plot", str(tmp_path / "empty.txt" / "a.svg"))
    with pytest.raises(ConfigError, match=r"--plot writes \.svg and \.png"):
        run(capsys, *sizes, "--plot", str(tmp_path / "a.gif"))
