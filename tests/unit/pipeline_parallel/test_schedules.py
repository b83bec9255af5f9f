"""Schedules on gloo ranks against one process in float64, at every microbatch count."""

from __future__ import annotations

import pytest
import torch

from mcore.pipeline_parallel import (
    Schedule,
    default_schedule,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from mcore.pipeline_parallel.communication import SENDS_UNDER_WAY
from mcore.testing import run_distributed
from tests.unit.pipeline_parallel.tiny_stages import (
    peak_of_saved_tensors,
    reference,
    reference_two_tensors,
    run_schedule,
    run_two_tensors,
)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        (2, default_schedule(2, 1)),
        (2, default_schedule(2, 2)),
        (2, default_schedule(2, 3)),
        (4, default_schedule(4, 1)),
        (4, default_schedule(4, 2)),
        (4, Schedule(name="gpipe")),
        (4, Schedule(name="bounded", max_in_flight=2)),
        (2, Schedule(name="zb-h1")),
        (4, Schedule(name="zb-h1")),
        (2, Schedule(name="zb-v", num_chunks=2)),
        (4, Schedule(name="zb-v", num_chunks=2)),
    ],
    ids=lambda value: f"{value.name}-v{value.num_chunks}" if isinstance(value, Schedule) else value,
)
def test_every_microbatch_count_equals_one_process(pp, schedule):
    counts, v = range(1, 2 * pp + 2), schedule.num_chunks
    cases = [(m, "sum", False) for m in counts]
    cases += [(3, "mean", False), (pp, "mean", False), (3, "pair", False)]
    cases += [(1, "sum", True), (pp + 1, "sum", True), (2 * pp, "mean", True)]
    loss_rank = schedule.placement(pp).last_rank
    by_rank = run_distributed(run_schedule, pp, pp, schedule, cases, timeout=90)
    for index, (m, form, forward_only) in enumerate(cases):
        wanted, losses, count = reference(pp * v, m, form)
        results = [results[index] for results in by_rank]
        got = {stage: grads for grads, _, _ in results for stage, grads in grads.items()}
        assert sorted(got) == list(range(pp * v))
        for stage, grads in enumerate(wanted):
            torch.testing.assert_close(
                got[stage], {} if forward_only else grads, rtol=1e-12, atol=1e-12
            )
        torch.testing.assert_close(results[loss_rank][1], losses, rtol=1e-12, atol=1e-12)
        total = 1.0 if form == "mean" else float(count)
        for rank, (_, records, tokens) in enumerate(results):
            assert rank == loss_rank or records == []
            assert forward_only or tokens == (total if rank == loss_rank else 0.0)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        (Schedule(name="1f1b"), lambda rank, m: min(4 - rank, m)),
        (Schedule(name="gpipe"), lambda rank, m: m),  # noqa: ARG005
        (Schedule(name="bounded", max_in_flight=2), lambda rank, m: min(4 - rank, 2, m)),
    ],
    ids=["1f1b", "gpipe", "bounded"],
)
def test_memory_is_that_of_the_microbatches_in_flight(schedule, in_flight):
    counts = [1, 4, 8, 12]
    by_rank = run_distributed(peak_of_saved_tensors, 4, 4, schedule, counts, False, timeout=60)
    for rank, peaks in enumerate(by_rank):
        one = peaks[0][0]
        assert one > 0
        assert [saved for saved, _ in peaks] == [one * in_flight(rank, m) for m in counts]
        assert max(outputs for _, outputs in peaks) <= SENDS_UNDER_WAY


@pytest.mark.dist
def test_an_evaluation_holds_no_output_that_was_sent():
    schedule = Schedule(name="1f1b")
    by_rank = run_distributed(peak_of_saved_tensors, 2, 2, schedule, [9], True, timeout=60)
    assert all(outputs <= SENDS_UNDER_WAY for ((_, outputs),) in by_rank)


@pytest.mark.dist
@pytest.mark.parametrize("fixed", [True, False], ids=["announced", "varying"])
@pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        (2, Schedule(name="1f1b")),
        (4, Schedule(name="zb-h1")),
        (2, Schedule(name="interleaved-1f1b", num_chunks=2)),
        (4, Schedule(name="zb-v", num_chunks=2)),
    ],
    ids=["1f1b", "zb-h1", "interleaved", "zb-v"],
)
def test_several_tensors_of_any_shape(pp, schedule, fixed):
    m, num_stages = 2 * pp + 1, pp * schedule.num_chunks
    by_rank = run_distributed(run_two_tensors, pp, pp, schedule, m, fixed, timeout=60)
    got = {stage: grads for grads in by_rank for stage, grads in grads.items()}
    for stage, wanted in enumerate(reference_two_tensors(num_stages, m, fixed)):
        torch.testing.assert_close(got[stage], wanted, rtol=1e-12, atol=1e-12)


def test_the_schedule_follows_the_layout():
    assert get_forward_backward_func() is forward_backward_no_pipelining
    assert get_forward_backward_func(1, 2) is forward_backward_no_pipelining
    assert get_forward_backward_func(2) is forward_backward_pipelining_without_interleaving
    assert get_forward_backward_func(4, 2) is forward_backward_pipelining_with_interleaving
    assert "num_microbatches: m >= 1" in (forward_backward_no_pipelining.__doc__ or "")
