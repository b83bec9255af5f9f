"""The simulator refuses what would hang or compute something else, and says where."""

from __future__ import annotations

import pytest

from mcore.errors import ScheduleError
from mcore.pipeline_parallel.actions import parse_action, parse_plans
from mcore.pipeline_parallel.communication import Batch, plan_communication
from mcore.pipeline_parallel.messages import Message
from mcore.pipeline_parallel.plans import plan_1f1b, plan_interleaved
from mcore.pipeline_parallel.simulate import Costs, simulate
from mcore.pipeline_parallel.timetable import format_timetable
from mcore.topology.placement import Location, StagePlacement

TWO = StagePlacement.usual(2)
GOOD = "F0.0 F0.1 B0.0 B0.1\nF0.0 B0.0 F0.1 B0.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 F0.1 B0.0 B0.1\nF0.0 B0.0 F0.1", r"rank 1, action B0\.1: it is missing"),
        ("F0.0 F0.1 B0.0 B0.1\nF0.0 B0.0 B0.1", r"rank 1, action F0\.1: it is missing"),
        (
            "F0.0 F0.0 F0.1 B0.0 B0.1\nF0.0 B0.0 F0.1 B0.1",
            r"rank 0, action F0\.0: it is planned 2 times",
        ),
        (
            "F0.0 F0.1 B0.0 B0.1\nF0.0 B0.1 F0.1 B0.0",
            r"rank 1, action B0\.1: it comes before its own",
        ),
        (
            "F0.0 F0.1 B0.0 B0.1\nF0.0 F1.0 B0.0 F0.1 B0.1",
            r"rank 1, action F1\.0: the rank has chunks",
        ),
        (
            "F0.0 B0.0 F0.1 B0.1\nF0.0 F0.1 B0.0 B0.1",
            r"rank 0, action B0\.0: deadlock: it waits for B0\.0 of rank 1, which comes after",
        ),
        ("F0.0 B0.0", "2 plans are needed"),
        ("\n", "2 plans are needed"),
    ],
)
def test_broken_plans_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(parse_plans(text), TWO)


def test_empty_plans_are_refused():
    with pytest.raises(ScheduleError, match="at least one microbatch"):
        simulate([(), ()], TWO)


def activation(microbatch):
    return Message(parse_action(f"F0.{microbatch}"), 0, parse_action(f"F0.{microbatch}"), 1)


def gradient(microbatch):
    return Message(parse_action(f"B0.{microbatch}"), 1, parse_action(f"B0.{microbatch}"), 0)


def program(*steps):
    """Texts are actions, (sends, receives) are batches."""
    return tuple(
        parse_action(step) if isinstance(step, str) else Batch(tuple(step[0]), tuple(step[1]))
        for step in steps
    )


def good_programs():
    return [
        program(
            *("F0.0", ([activation(0)], []), "F0.1", ([activation(1)], [gradient(0)])),
            *("B0.0", ([], [gradient(1)]), "B0.1"),
        ),
        program(
            *(([], [activation(0)]), "F0.0", "B0.0", ([gradient(0)], [activation(1)])),
            *("F0.1", "B0.1", ([gradient(1)], [])),
        ),
    ]


def test_programs_written_by_hand():
    plans = parse_plans(GOOD)
    result = simulate(plans, TWO, programs=good_programs())
    assert result.step_time == 9.0
    assert result.ideal_time == 6.0
    assert result.peak_in_flight == (2, 1)


def test_both_ranks_receive_before_they_send():
    """The textbook deadlock; a backend that buffers would hide it, NCCL does not."""
    zero, one = good_programs()
    zero = program(
        *("F0.0", ([activation(0)], []), "F0.1", ([], [gradient(0)]), ([activation(1)], [])),
        *("B0.0", ([], [gradient(1)]), "B0.1"),
    )
    one = program(
        *(([], [activation(0)]), "F0.0", "B0.0", ([], [activation(1)]), ([gradient(0)], [])),
        *("F0.1", "B0.1", ([gradient(1)], [])),
    )
    with pytest.raises(ScheduleError, match=r"rank 0, action B0\.0: deadlock: .* stuck at B0\.0@1"):
        simulate(parse_plans(GOOD), TWO, programs=[zero, one])


def test_a_pair_of_ranks_matches_by_order():
    plans = parse_plans("F0.0 F0.1 B0.0 B0.1\nF0.0 F0.1 B0.0 B0.1")
    programs = [
        program(
            *("F0.0", "F0.1", ([activation(1)], []), ([activation(0)], [gradient(0)])),
            *("B0.0", ([], [gradient(1)]), "B0.1"),
        ),
        program(
            *(([], [activation(0)]), ([], [activation(1)]), "F0.0", "F0.1", "B0.0"),
            *(([gradient(0)], []), "B0.1", ([gradient(1)], [])),
        ),
    ]
    expected = (
        r"rank 1, action F0\.0: it would get F0\.1@0->F0\.1@1 from rank 0 in place of F0\.0@0"
    )
    with pytest.raises(ScheduleError, match=expected):
        simulate(plans, TWO, programs=programs)


def test_a_send_without_a_receive_is_a_deadlock():
    zero, one = good_programs()
    zero = (*zero[:-2], zero[-1])  # rank 0 never posts the receive of its last gradient
    with pytest.raises(ScheduleError, match=r"rank 0, action B0\.1: the receive of B0\.1@1"):
        simulate(parse_plans(GOOD), TWO, programs=[zero, one])
    zero, one = good_programs()
    one = one[:-1]
    with pytest.raises(ScheduleError, match=r"rank 0, action B0\.1: deadlock"):
        simulate(parse_plans(GOOD), TWO, programs=[zero, one])


def test_a_tensor_cannot_be_sent_before_it_exists():
    zero, one = good_programs()
    zero = (zero[1], zero[0], *zero[2:])
    with pytest.raises(
        ScheduleError, match=r"rank 0, action F0\.0: .* is sent before it is computed"
    ):
        simulate(parse_plans(GOOD), TWO, programs=[zero, one])


def test_a_program_must_run_its_plan():
    with pytest.raises(ScheduleError, match="rank 1: the program does not run the actions"):
        simulate(parse_plans(GOOD), TWO, programs=[good_programs()[0], good_programs()[1][:-2]])


def test_chunks_of_one_rank_hand_over_without_messages():
    placement = StagePlacement.usual(1, 2)
    plans = parse_plans("F0.0 F1.0 B1.0 B0.0")
    assert plan_communication(plans, placement) == plans
    with pytest.raises(ScheduleError, match=r"rank 0, action F1\.0: deadlock"):
        simulate(parse_plans("F1.0 F0.0 B1.0 B0.0"), placement)


def test_receives_are_posted_ahead_and_sends_at_once():
    plans = [plan_1f1b(2, rank, 3) for rank in range(2)]
    zero, one = plan_communication(plans, TWO)
    # The activation of microbatch 1 is asked for before the backward of microbatch 0 is run.
    assert one[:4] == program(([], [activation(0)]), "F0.0", ([], [activation(1)]), "B0.0")
    assert zero[:4] == program("F0.0", ([activation(0)], []), "F0.1", ([activation(1)], []))
    # Steady state: one exchange.
    assert Batch((activation(2),), (gradient(1),)) in zero
    assert Batch((gradient(1),), (activation(2),)) in one


def test_receive_buffers_stay_few():
    for pp, v, m in ((8, 1, 32), (8, 3, 32), (4, 2, 64)):
        plans = [plan_interleaved(pp, rank, m, v) for rank in range(pp)]
        assert max(simulate(plans, StagePlacement.usual(pp, v)).peak_receives) <= 4


def test_speed_under_other_costs_than_the_order_was_made_for():
    """In-order communication costs little beside communication without any order."""
    for costs in (Costs(1, 0.5, 0.5), Costs(1, 1.5, 1.5), Costs(1, 1.1, 1, 0.05)):
        for pp, v, m in ((4, 1, 8), (8, 1, 32), (4, 2, 8), (8, 3, 32)):
            plans = [plan_interleaved(pp, rank, m, v) for rank in range(pp)]
            result = simulate(plans, StagePlacement.usual(pp, v), costs)
            action_pair = costs.forward + costs.backward + costs.weight
            turns = 2 * v * pp * costs.communication * (1 + m / 8)
            assert result.step_time <= 1.03 * (m * v + pp - 1) * action_pair + turns


def test_communication_time_counts():
    plans = [plan_1f1b(2, rank, 1) for rank in range(2)]
    result = simulate(plans, TWO, Costs(communication=0.25))
    assert result.step_time == 1 + 0.25 + 1 + 2 + 0.25 + 2
    assert result.bubble == pytest.approx(1 - 6 / 13)


def test_table():
    placement = StagePlacement((Location(0, 0), Location(1, 0)))
    result = simulate(parse_plans(GOOD), placement)
    assert format_timetable(result) == (
        "rank 0  F0.0 F0.1 .... .... B0.0 ---- .... B0.1 ----\n"
        "rank 1  .... F0.0 B0.0 ---- F0.1 B0.1 ---- .... ...."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0.0 W0.0 B0.0\nF0.0 B0.0", r"rank 0, action W0\.0: it comes before its own backward"),
        ("F0.0 B0.0 W0.0 W0.0\nF0.0 B0.0", r"rank 0, action W0\.0: it is planned 2 times"),
        ("F0.0 B0.0 W1.0\nF0.0 B0.0", r"rank 0, action W1\.0: it comes before its own backward"),
        ("F0.0 W0.0\nF0.0", r"rank 0, action W0\.0: it comes before its own backward"),
    ],
)
def test_misplaced_weight_gradients_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(parse_plans(text), TWO)


def test_only_a_backward_with_a_w_of_its_own_is_short():
    plans = parse_plans("F0.0 F0.1 B0.0 W0.0 B0.1\nF0.0 B0.0 F0.1 B0.1 W0.0")
    result = simulate(plans, TWO, Costs(forward=1, backward=2, weight=4))
    spans = {str(span.action): span.end - span.start for span in result.spans[0]}
    assert spans == {"F0.0": 1, "F0.1": 1, "B0.0": 2, "W0.0": 4, "B0.1": 6}
    assert result.peak_in_flight == (2, 2)  # rank 1 holds microbatch 0 until W0.0
