"""What the profile says of steps that the simulator itself has run."""

from __future__ import annotations

import json
import logging
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from mcore.pipeline_parallel import (
    Costs,
    Schedule,
    build_pipeline,
    default_schedule,
    parse_schedule,
    simulate,
)
from mcore.pipeline_parallel.actions import backward, forward
from mcore.topology.group import Group
from mcore.training import pipeline_profile
from mcore.training.observation import Observation
from mcore.training.pipeline_profile import PipelineProfile
from mcore.training.pipeline_report import (
    Event,
    measured_communication,
    measured_costs,
    report_bubble,
)

ZB_V = Schedule(name="zb-v", num_chunks=2)
#: W for one microbatch on one rank only.
MIXED = parse_schedule("F0.0 F0.1 B0.0 B0.1\nF0.0 B0.0 F0.1 B0.1 W0.1", "mixed.txt")
CUSTOM = Schedule(name="custom", custom=MIXED)


def happened(schedule, counts, own, communication=0.0, skew=0.0):
    """Events of a step for each count of microbatches on two ranks, and their simulations.

    The clock of rank 1 is fast by `skew`.
    """
    ranks, wanted = ([], []), []
    for step, m in enumerate(counts):
        pipeline = build_pipeline(schedule, 2, m)
        message = Costs(communication=communication)
        result = simulate(
            pipeline.plans, pipeline.placement, message, pipeline.programs, own_costs=own
        )
        wanted.append(result)
        for rank, spans in enumerate(result.spans):
            free = zero = 1000.0 * step + skew * rank
            for span in spans:
                ranks[rank].append(
                    Event(step, str(span.action), free, zero + span.start, zero + span.end)
                )
                free = zero + span.end
    return ranks, wanted


def uneven(chunks):
    return {(r, c): Costs(2 + r, 3 + c, 4 + r - c) for r in (0, 1) for c in range(chunks)}


def rounded(costs):
    return {key: (c.forward, c.backward, c.weight) for key, c in costs.items()}


def test_costs_are_those_of_each_chunk():
    ranks, _ = happened(ZB_V, [5, 5], uneven(2))
    assert rounded(measured_costs(ranks)) == rounded(uneven(2))


def test_backwards_may_be_split_on_one_rank_only():
    own = uneven(1)
    ranks, (wanted,) = happened(CUSTOM, [2], own)
    costs = rounded(measured_costs(ranks))
    assert costs[0, 0] == (2, 3 + 4, 0)
    assert costs[1, 0] == (3, 3, 5)
    report = report_bubble(ranks, CUSTOM)
    assert (report.predicted, report.predicted_step_time) == pytest.approx(
        (wanted.bubble, wanted.step_time)
    )


@pytest.mark.parametrize("skew", [0.0, -0.5, 0.5])
def test_a_message_takes_what_both_directions_say(skew):
    schedule = Schedule(name="1f1b")
    ranks, _ = happened(schedule, [6], {}, communication=0.25, skew=skew)
    assert measured_communication(ranks, schedule.placement(2)) == pytest.approx(0.25)


@pytest.mark.parametrize("schedule", [Schedule(name="1f1b"), ZB_V], ids=lambda s: s.name)
def test_what_the_simulator_did_is_what_it_predicts(schedule):
    """Also where the batch grows, and the recorded steps have other microbatches than the last."""
    counts = [2, 4, 4, 6, 3]
    ranks, wanted = happened(schedule, counts, uneven(schedule.num_chunks), communication=0.125)
    report = report_bubble(ranks, schedule)
    assert report.predicted_step_time == pytest.approx(
        median(result.step_time for result in wanted), rel=0.02
    )
    assert report.step_time == pytest.approx(report.predicted_step_time, rel=0.02)
    assert report.measured == pytest.approx(report.predicted, abs=0.01)


def test_the_log_says_what_was_measured_and_what_was_predicted(monkeypatch, tmp_path, caplog):
    ranks, (wanted,) = happened(CUSTOM, [2], uneven(1))
    monkeypatch.setattr(pipeline_profile, "all_gather_object", lambda own, group: ranks)  # noqa: ARG005
    runtime = SimpleNamespace(
        device=torch.device("cpu"),
        ctx=SimpleNamespace(pp=Group("pp", (0, 1), 0, object())),
        pipeline=SimpleNamespace(schedule=CUSTOM),
        is_writer=True,
    )
    path = tmp_path / "new" / "trace.json"
    with caplog.at_level(logging.INFO, logger="mcore"):
        report = PipelineProfile(str(path), runtime).write()
    # Everything starts with rank 0's first action, and nothing is communicated after the last.
    assert report.measured == pytest.approx(wanted.bubble)
    share = f"{100 * wanted.bubble:.2f}%"
    time = f"{1000 * wanted.step_time:.1f} ms"
    line = f"bubble {share} measured, {share} predicted; step {time} measured, {time} predicted"
    assert line in caplog.text
    assert json.loads(path.read_text())["otherData"]["bubble_predicted"] == report.predicted
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO, logger="mcore"):  # training goes on without one
        assert PipelineProfile(str(tmp_path / "file" / "trace.json"), runtime).write() == report
    assert "--profile-pipeline" in caplog.text
    assert "cannot be written" in caplog.text


@pytest.fixture
def alone():
    """The runtime of the writer, in a pipeline of one."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        ctx=SimpleNamespace(pp=Group.single("pp")),
        pipeline=SimpleNamespace(schedule=default_schedule(1)),
        is_writer=True,
    )


def steps(observation, numbers):
    for number in numbers:
        observation.before_step(number)
        for action in (forward(0, 0), backward(0, 0)):
            observer = observation.observer()
            with observer.waiting(action), observer.running(action):
                pass
        observation.after_step(number + 1, 0.0)


def recorded_steps(path):
    events = json.loads(path.read_text())["traceEvents"]
    return sorted({event["args"]["iteration"] for event in events if event["ph"] == "X"})


def test_the_trace_is_there_once_the_eleventh_step_is_done(alone, tmp_path):
    """Whatever becomes of the run after that."""
    path = tmp_path / "trace.json"
    profile = PipelineProfile(str(path), alone)
    observation = Observation(pipeline=profile)
    steps(observation, range(10))
    assert not path.exists()
    steps(observation, [10])
    assert recorded_steps(path) == [*range(2, 12)]  # iterations, from 1
    path.unlink()
    steps(observation, [11, 12])
    profile.close()
    assert not path.exists()  # it is written once


def test_a_run_that_ends_earlier_writes_what_there_is(alone, tmp_path, caplog):
    path = tmp_path / "trace.json"
    profile = PipelineProfile(str(path), alone)
    steps(Observation(pipeline=profile), range(3))
    profile.close()
    assert recorded_steps(path) == [2, 3]
    assert "no effect" not in caplog.text
    of_one_step = PipelineProfile(str(tmp_path / "none.json"), alone)
    steps(Observation(pipeline=of_one_step), [0])
    of_one_step.close()
    assert "--profile-pipeline has no effect: the first step of a start" in caplog.text
    assert not (tmp_path / "none.json").exists()
