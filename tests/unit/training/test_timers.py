import pytest
import torch

from mcore import device
from mcore.pipeline_parallel.actions import Action, Kind
from mcore.training.timers import RankTimes, Timers


class Ticks(device.Clock):
    """A clock whose marks are seconds that a test chooses."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.now = 0.0

    def mark(self):
        return getattr(self, "now", 0.0)


@pytest.fixture
def clock():
    return Ticks()


def spend(clock, context, seconds):
    with context:
        clock.now += seconds


def test_phases_add_up_until_they_are_taken(clock):
    timers = Timers(clock, 1)
    spend(clock, timers("optimizer"), 2.0)
    spend(clock, timers("optimizer"), 3.0)
    timers.add("optimizer", 0.5)
    assert timers.take() == {"optimizer": 5.5}
    assert timers.take() == {}


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_phase_above_the_level_is_not_timed(clock, level):
    timers = Timers(clock, level)
    for phase_level, name in enumerate(("a", "b", "c")):
        spend(clock, timers(name, phase_level), 1.0)
    spend(clock, timers.running(Action(Kind.BACKWARD, 0, 0)), 1.0)
    spend(clock, timers.waiting(Action(Kind.FORWARD, 0, 1)), 1.0)
    names = ["a", "b", "c", "backward-compute", "forward-recv"]
    assert list(timers.take()) == names[: [1, 2, 5][level]]


def test_the_lines_are_megatrons():
    times = RankTimes([{"optimizer": 0.2, "own": 0.1}, {"optimizer": 0.4}])
    assert times.text("minmax", steps=2).splitlines() == [
        "(min, max) time across ranks (ms):",
        "    optimizer ......................................: (100.00, 200.00)",
        "    own ............................................: (50.00, 50.00)",
    ]
    assert times.text("max").splitlines()[:2] == [
        "max time across ranks (ms):",
        "    optimizer ......................................: 400.00",
    ]
    assert times.text("all").splitlines()[:4] == [
        "times across ranks (ms):",
        "  optimizer:",
        "     rank  0: 200.00",
        "     rank  1: 400.00",
    ]


def test_nothing_timed_is_nothing_said():
    assert RankTimes([{}, {}]).text("minmax") == ""


def test_the_slowest_rank_of_each_phase_is_named():
    times = RankTimes(
        [
            {"forward-compute": 1.0, "forward-recv": 9.0, "optimizer": 0.2, "batch-generator": 0.4},
            {"forward-compute": 3.0, "forward-recv": 0.1, "optimizer": 0.2, "batch-generator": 0.1},
            {"forward-compute": 1.0, "forward-recv": 9.0, "optimizer": 0.2, "batch-generator": 0.1},
        ]
    )
    first, second = times.stragglers(steps=10)
    assert first == "forward-compute: rank 1 takes 300.00 ms a step, 3.00 times the median"
    assert second == "batch-generator: rank 0 takes 40.00 ms a step, 4.00 times the median"


def test_ranks_that_wait_for_each_other_are_named_together():
    """A slow tensor-parallel rank keeps its group waiting inside of the layers."""
    seconds = [1.0, 1.0, 2.5, 2.4]
    times = RankTimes([{"forward-compute": s, "optimizer-inner-step": 0.1 * s} for s in seconds])
    first, second = times.stragglers([(0, 1), (2, 3)])
    assert first.startswith("forward-compute: tensor-parallel ranks 2 3 take 2500.00 ms a step")
    assert second.startswith("optimizer-inner-step: rank 2 takes 250.00 ms")
