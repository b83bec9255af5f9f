"""The simulator refuses what would hang or compute something else, and says where."""

from __future__ import annotations

import pytest

from mcore.errors import ConfigError, ScheduleError
from mcore.pipeline_parallel.actions import parse_action, parse_plans
from mcore.pipeline_parallel.communication import Batch, plan_communication
from mcore.pipeline_parallel.costs import Costs
from mcore.pipeline_parallel.messages import Message
from mcore.pipeline_parallel.pipeline import build_pipeline
from mcore.pipeline_parallel.plans import forward_part, plan_1f1b, plan_interleaved
from mcore.pipeline_parallel.schedule import Schedule
from mcore.pipeline_parallel.simulate import simulate
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
        (
            "F0.0 F0.1 B0.0 B0.1\nF0.1 F0.0 B0.0 B0.1",
            r"rank 1, action F0\.1: it comes before F0\.0: a chunk reads its data in the order",
        ),
        (
            "F0.0 B0.0\nF0.99999999999 B0.99999999999",
            r"rank 1, action F0\.99999999999: a rank has 2 actions, too few for 100000000000",
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


def test_a_rank_that_only_sends_does_not_run_ahead():
    """Rank 0 of an evaluation goes on when all but two of its outputs have been asked for."""
    plans = [forward_part(plan_1f1b(2, rank, 8)) for rank in range(2)]
    slow = {(1, 0): Costs(forward=10)}
    first, second = simulate(plans, TWO, Costs(), own_costs=slow).spans
    asked = [0, *(span.start for span in second)]  # one action before the microbatch is used
    starts = [span.start for span in first]
    assert starts == [0, 1, 2, *(max(asked[k], k + 3) for k in range(5))]


def test_each_chunk_of_a_rank_may_cost_something_else():
    placement = StagePlacement.usual(2, 2)
    plans = [plan_interleaved(2, rank, 2, 2) for rank in range(2)]
    own = {(rank, chunk): Costs(1 + rank, 2 + chunk, 4) for rank in (0, 1) for chunk in (0, 1)}
    result = simulate(plans, placement, own_costs=own)
    for rank, spans in enumerate(result.spans):
        for span in spans:
            kind, chunk = str(span.action)[0], span.action.chunk
            wanted = 1 + rank if kind == "F" else 6 + chunk
            assert span.end - span.start == wanted


@pytest.mark.parametrize(
    "costs",
    [(-1, 1, 1, 0), (1, float("nan"), 1, 0), (1, 1, 1, float("inf")), (0, 1, 1, 0), (1, 0, 0, 0)],
)
def test_costs_that_are_no_times_are_refused(costs):
    with pytest.raises(ConfigError, match="costs are times|must take some time"):
        Costs(*costs)


SCHEDULES = [
    Schedule(name="gpipe"),
    Schedule(name="1f1b"),
    Schedule(name="interleaved-1f1b", num_chunks=2),
    Schedule(name="bounded", max_in_flight=2),
    Schedule(name="zb-h1"),
    Schedule(name="zb-v", num_chunks=2),
]
ODD_COSTS = [
    *(Costs(communication=0.5), Costs(1, 1.1, 0.7, 0.3), Costs(0.3, 0.1, 0.2), Costs(1, 1, 0)),
    *(Costs(3, 0.7, 1.9, 0.05), Costs(1e-3, 2e-3, 1.5e-3, 1e-4), Costs(7, 3, 2)),
    *(Costs(1e6, 2, 1, 1), Costs(1, 1, 1, 1e5)),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("costs", ODD_COSTS, ids=str)
def test_every_action_stands_in_the_table_in_order(schedule, costs):
    for pp, m in ((2, 2), (3, 5), (4, 8)):
        pipeline = build_pipeline(schedule, pp, m)
        result = simulate(pipeline.plans, pipeline.placement, costs, pipeline.programs)
        rows = [line.split()[2:] for line in format_timetable(result).splitlines()]
        assert max(map(len, rows)) < 700  # 500, and what short actions push on
        shown = [[cell for cell in row if cell[0] not in ".-"] for row in rows]
        assert shown == [list(map(str, plan)) for plan in pipeline.plans]


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
