"""Plans against Megatron's order tables, the papers' formulas and exhaustive small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore.errors import ConfigError
from mcore.pipeline_parallel.actions import Kind, format_plan
from mcore.pipeline_parallel.costs import Costs
from mcore.pipeline_parallel.pipeline import build_pipeline
from mcore.pipeline_parallel.plans import (
    interleaved_order,
    plan_1f1b,
    plan_bounded,
    plan_gpipe,
    plan_interleaved,
    plan_no_pipelining,
)
from mcore.pipeline_parallel.schedule import Schedule
from mcore.pipeline_parallel.simulate import simulate
from mcore.pipeline_parallel.zero_bubble import plan_zb_h1, plan_zb_v
from mcore.topology.placement import StagePlacement

GOLDEN = Path(__file__).parents[2] / "golden" / "pipeline" / "interleaved.json"
CASES = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "m{num_microbatches}-v{num_model_chunks}".format(**c)
)
def test_interleaved_order_is_megatrons(case):
    m, v, group = case["num_microbatches"], case["num_model_chunks"], case["group"]
    table = tuple(map(tuple, case["table"]))
    assert interleaved_order(m, v, group) == table
    for pp in range(2, group + 1):
        for rank in range(pp):
            plan = plan_interleaved(pp, rank, m, v, group)
            forwards = [(a.microbatch, a.chunk) for a in plan if a.kind is Kind.FORWARD]
            backwards = [(a.microbatch, v - 1 - a.chunk) for a in plan if a.kind is Kind.BACKWARD]
            assert tuple(forwards) == table
            assert tuple(backwards) == table


def leading_forwards(plan):
    kinds = [action.kind for action in plan]
    return kinds.index(Kind.BACKWARD)


def test_no_pipelining():
    assert format_plan(plan_no_pipelining(2)) == "F0.0 B0.0 F0.1 B0.1"
    assert format_plan(plan_no_pipelining(2, 2)) == "F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1"


def test_1f1b_written_out():
    assert format_plan(plan_1f1b(2, 0, 3)) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert format_plan(plan_1f1b(2, 1, 3)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


def test_interleaved_written_out():
    # Figure 4 of Narayanan et al. 2021 (4 devices, 8 microbatches, 2 chunks), devices 1 and 4.
    first = format_plan(plan_interleaved(4, 0, 8, 2))
    assert first.startswith("F0.0 F0.1 F0.2 F0.3 F1.0 F1.1 F1.2 F1.3 F0.4 F0.5 F0.6 B1.0 F0.7 B1.1")
    last = format_plan(plan_interleaved(4, 3, 8, 2))
    assert last.startswith("F0.0 F0.1 F0.2 F0.3 F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 F0.4 B0.0")


def test_warmup_formulas():
    for pp in range(1, 9):
        for rank in range(pp):
            for m in range(1, 17):
                warmup = min(pp - rank - 1, m)
                assert leading_forwards(plan_1f1b(pp, rank, m)) == min(warmup + 1, m)
                if m % pp:
                    continue
                for v in (2, 3, 4):
                    warmup = min(2 * (pp - rank - 1) + (v - 1) * pp, m * v)
                    leading = leading_forwards(plan_interleaved(pp, rank, m, v))
                    assert leading == min(warmup + 1, m * v)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_size_is_proved(every):
    """pp <= 8, m <= 16, v <= 4: no deadlock, each action once, the papers' peaks and bubbles."""
    some = (1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 16)
    for pp in range(1, 9):
        for v in range(1, 5):
            placement = StagePlacement.usual(pp, v)
            for m in range(1, 17) if v < 3 or every else some:
                plans = [plan_interleaved(pp, rank, m, v) for rank in range(pp)]
                result = simulate(plans, placement)
                assert all(len(plan) == len(set(plan)) == 2 * m * v for plan in plans)
                if v == 1:
                    assert result.peak_in_flight == tuple(min(pp - r, m) for r in range(pp))
                    assert result.bubble_over_ideal == pytest.approx((pp - 1) / m)
                elif m % pp == 0:
                    peaks = (2 * (pp - r - 1) + (v - 1) * pp + 1 for r in range(pp))
                    assert result.peak_in_flight == tuple(min(peak, m * v) for peak in peaks)
                    assert result.bubble_over_ideal == pytest.approx((pp - 1) / (m * v))
                else:
                    # Never slower than with the remainder filled up to a whole round.
                    full = -(-m // pp) * pp
                    assert result.step_time <= 3 * (full * v + pp - 1)


def times(plans, placement, **costs):
    result = simulate(plans, placement, Costs(**costs))
    return result.step_time, result.peak_in_flight


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_sizes_of_the_other_schedules_are_proved(every):
    """pp <= 8, m <= 16 against closed forms at f = b = w = 1."""
    for pp in range(1, 9):
        usual, v = StagePlacement.usual(pp), StagePlacement.v(pp)
        for m in range(1, 17) if every else {1, pp - 1 or 2, pp, pp + 1, min(16, 2 * pp - 1)}:
            time, peaks = times([plan_gpipe(pp, rank, m) for rank in range(pp)], usual)
            assert (time, set(peaks)) == (3 * (m + pp - 1), {m})
            for most in (1, 2, pp):
                plans = [plan_bounded(pp, rank, m, most) for rank in range(pp)]
                time, peaks = times(plans, usual)
                assert peaks == tuple(min(pp - rank, m, most) for rank in range(pp))
                if most == 1:
                    assert time == 3 * pp * m
                elif most == pp:
                    assert plans == [plan_1f1b(pp, rank, m) for rank in range(pp)]
            zb_h1 = [plan_zb_h1(pp, rank, m) for rank in range(pp)]
            time, peaks = times(zb_h1, usual)
            assert time == max(3 * m + pp - 1, 2 * (m + pp) - 1)
            assert max(peaks) <= min(pp, m)
            time, peaks = times([plan_zb_v(pp, rank, m) for rank in range(pp)], v)
            assert time == max(6 * m + pp - 1, 4 * (m + pp) - 2)
            assert max(peaks) <= 2 * min(pp, m)


def test_zero_bubble_written_out():
    # Figure 3 of Qi et al. 2023 (4 devices, 8 microbatches), devices 1 and 4.
    first = format_plan(plan_zb_h1(4, 0, 8))
    assert first.startswith("F0.0 F0.1 F0.2 F0.3 B0.0 W0.0 F0.4 B0.1 W0.1 F0.5 B0.2 W0.2")
    last = format_plan(plan_zb_h1(4, 3, 8))
    assert last.startswith("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 W0.0 F0.4 B0.4 W0.1")
    assert last.endswith("F0.7 B0.7 W0.4 W0.5 W0.6 W0.7")
    turn = format_plan(plan_zb_v(4, 3, 8))
    assert turn.startswith("F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 F0.3 F1.3 B1.0 W1.0 F0.4 B0.0 W0.0")


def test_ranks_of_zb_v_wait_only_before_their_first_and_after_their_last_action():
    for pp in (2, 4, 8):
        plans = [plan_zb_v(pp, rank, 2 * pp + 3) for rank in range(pp)]
        for spans in simulate(plans, StagePlacement.v(pp), Costs()).spans:
            gaps = [b.start - a.end for a, b in zip(spans, spans[1:], strict=False)]
            assert max(gaps) == 0


@pytest.mark.parametrize("f", [1, 3])
@pytest.mark.parametrize(("b", "w"), [(1, 1), (2, 1), (3, 2), (2, 3), (5, 1)])
def test_the_idle_time_of_zb_h1_is_that_of_the_page(f, b, w):
    """(p - 1) max(f + b - w, f, b) for m >= p; none of it is due to the order of messages."""
    for pp in (1, 2, 3, 5):
        for m in (pp, pp + 1, 3 * pp):
            plans = [plan_zb_h1(pp, rank, m) for rank in range(pp)]
            time, _ = times(plans, StagePlacement.usual(pp), forward=f, backward=b, weight=w)
            assert time == m * (f + b + w) + (pp - 1) * max(f + b - w, f, b)


@pytest.mark.parametrize("group", [4, 5, 6, 9])
def test_larger_groups_are_proved(group):
    for m in range(1, 20):
        plans = [plan_interleaved(4, rank, m, 3, group) for rank in range(4)]
        simulate(plans, StagePlacement.usual(4, 3))


@pytest.mark.full
@pytest.mark.parametrize("pp", range(2, 9))
def test_every_larger_group_is_proved(pp):
    for v in (2, 3, 4):
        for group in (pp + 1, pp + 3, 2 * pp, 17):
            for m in range(1, 17):
                plans = [plan_interleaved(pp, rank, m, v, group) for rank in range(pp)]
                simulate(plans, StagePlacement.usual(pp, v))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_evaluations_are_proved(every):
    """Each microbatch goes through; nothing is held; all ranks work once the first has come."""
    for pp in range(1, 9) if every else (1, 2, 3, 5, 8):
        for m in range(1, 17) if every else {1, pp, pp + 1, 2 * pp - 1}:
            for schedule in evaluated(pp):
                pipeline = build_pipeline(schedule, pp, m, forward_only=True)
                v = schedule.num_chunks
                assert all(len(set(plan)) == len(plan) == m * v for plan in pipeline.plans)
                result = simulate(pipeline.plans, pipeline.placement, programs=pipeline.programs)
                assert set(result.peak_in_flight) == {1}
                if v == 1:
                    assert result.step_time == m + pp - 1
                else:
                    assert m * v + pp - 1 <= result.step_time <= (m + pp) * v + pp


def evaluated(pp):
    yield Schedule(name="zb-v", num_chunks=2)
    yield Schedule(name="zb-h1")
    if pp > 1:
        yield from (Schedule(name="interleaved-1f1b", num_chunks=v) for v in (2, 3, 4))
        yield Schedule(name="bounded", max_in_flight=2)
        yield Schedule(name="gpipe")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1), "pp must be at least 1, got 0"),
        ((2, 0, 0), "num_microbatches must be at least 1, got 0"),
        ((2, 2, 1), r"rank must be one of 0 \.\. 1 \(pipeline size 2\), got 2"),
    ],
)
def test_impossible_sizes_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        plan_1f1b(*arguments)


def test_a_group_smaller_than_the_pipeline_is_refused():
    with pytest.raises(ConfigError, match=r"group size \(2\) must be at least the pipeline size"):
        plan_interleaved(4, 0, 8, 2, 2)
