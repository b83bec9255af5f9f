"""Schedules by name and from files."""

from __future__ import annotations

import pytest

from mcore.errors import ConfigError, ScheduleError
from mcore.pipeline_parallel import Schedule, build_pipeline, default_schedule, parse_schedule
from mcore.pipeline_parallel.actions import format_plans
from mcore.pipeline_parallel.pipeline import rank_program
from mcore.pipeline_parallel.schedule import SCHEDULE_NAMES

OPTIONS = {
    "interleaved-1f1b": {"num_chunks": 2},
    "bounded": {"max_in_flight": 2},
    "zb-v": {"num_chunks": 2},
}


@pytest.mark.parametrize("name", sorted(set(SCHEDULE_NAMES) - {"custom", "no-pipelining"}))
def test_a_schedule_written_to_a_file_is_the_same_schedule(name):
    schedule = Schedule(name=name, **OPTIONS.get(name, {}))
    pipeline = build_pipeline(schedule, 4, 6)
    text = "# a comment\n" + format_plans(pipeline.plans)
    if name == "zb-v":
        text = "placement: v\n" + text
    for written in (text, text.replace(" ", ",").replace("placement:,", "placement: ")):
        custom = parse_schedule(written.replace("#,a,", "# "), "mine.csv")
        same = Schedule(name="custom", num_chunks=custom.num_chunks, custom=custom)
        assert build_pipeline(same, 4, 6) == pipeline
        assert same.splits_backward == name.startswith("zb")
    with pytest.raises(ConfigError, match=r"mine\.csv is a schedule for 6 microbatches, and 8"):
        build_pipeline(same, 4, 8)


def test_cells_may_be_empty_and_quoted():
    custom = parse_schedule('"F0.0",,"B0.0"\n,F0.0,B0.0\n', "a.csv")
    assert format_plans(custom.plans) == "F0.0 B0.0\nF0.0 B0.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 X0.0", r"a\.csv: line 1: 'X0\.0' is no action: write .* one of F, B, W"),
        ("\nplacement: w", r"a\.csv: placement is 'w'; write usual or v"),
    ],
)
def test_files_that_cannot_be_read(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(text, "a.csv")


def test_a_file_that_hangs_is_refused_with_rank_action_and_reason():
    custom = parse_schedule("F0.0 B0.0 F0.1 B0.1\nF0.0 F0.1 B0.0 B0.1", "a.csv")
    with pytest.raises(ScheduleError, match=r"rank 0, action B0\.0: deadlock: it waits for B0\.0"):
        build_pipeline(Schedule(name="custom", custom=custom), 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 F0.1\nF0.0 F0.1", r"rank 0, action B0\.0: it is missing"),
        ("F0.0 B0.0 W0.0 F0.1\nF0.0 F0.1 B0.0", r"rank 0, action B0\.1: it is missing"),
        ("F0.0 W0.0\nF0.0 W0.0", r"rank 0, action B0\.0: it is missing"),
    ],
)
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_file_without_every_backward_is_refused(text, message, forward_only):
    custom = parse_schedule(text, "a.csv")
    m = custom.num_microbatches
    with pytest.raises(ScheduleError, match=message):
        build_pipeline(Schedule(name="custom", custom=custom), 2, m, forward_only)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "zb"}, "unknown schedule 'zb'; use one of gpipe, .*, zb-v, or file:PATH"),
        ({"name": "1f1b", "num_chunks": 2}, "use interleaved-1f1b or zb-v"),
        ({"name": "zb-v"}, "schedule zb-v runs two model chunks a rank, got 1"),
        ({"name": "1f1b", "max_in_flight": 2}, r"--max-in-flight-microbatches \(2\) belongs to"),
        ({"name": "bounded"}, "schedule bounded needs --max-in-flight-microbatches N"),
        ({"name": "1f1b", "group": 4}, r"microbatch-group-size-.* \(4\) belongs to schedule inter"),
        ({"name": "custom"}, "plans are needed for schedule custom"),
    ],
)
def test_options_that_do_not_belong_together(options, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(**options)


def test_defaults_are_megatrons():
    assert default_schedule(1, 3) == Schedule(name="no-pipelining", num_chunks=3)
    assert default_schedule(4) == Schedule(name="1f1b")
    assert default_schedule(4, 2, 6) == Schedule(name="interleaved-1f1b", num_chunks=2, group=6)
    with pytest.raises(ConfigError, match="needs pipeline size 1, got 2"):
        build_pipeline(default_schedule(1), 2, 1)


def test_a_rank_comes_back_to_many_numbers_of_microbatches_without_building_them_again():
    """More than whole pipelines are kept of: a token budget cuts every batch otherwise."""
    schedule, counts = Schedule(name="1f1b"), range(1, 21)
    first = [rank_program(schedule, 2, 1, m) for m in counts]
    built = build_pipeline.cache_info().misses
    assert [rank_program(schedule, 2, 1, m) for m in counts] == first
    assert build_pipeline.cache_info().misses == built
    assert first[7] == build_pipeline(schedule, 2, 8).programs[1]
