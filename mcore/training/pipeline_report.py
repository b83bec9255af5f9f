"""What a pipeline's recorded actions say: its bubble beside the one that the simulator predicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, NamedTuple

from mcore.pipeline_parallel import Costs, Kind, Schedule, build_pipeline, simulate
from mcore.pipeline_parallel.actions import parse_action, split_backwards
from mcore.pipeline_parallel.messages import incoming
from mcore.topology.placement import StagePlacement

#: Seconds; what a clock shows as nothing took some time.
_LEAST = 1e-9


class Event(NamedTuple):
    """One action of one rank in one step; times in seconds of the wall clock.

    Attributes:
        iteration: of the run, whose step it was.
        action: its text.
        waited: when the rank began to wait for what the action needs.
        start: when it began to compute.
        end: when it was done.
    """

    iteration: int
    action: str
    waited: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class BubbleReport:
    """Measured beside predicted; each is the median of the recorded steps.

    Attributes:
        measured: idle over total rank-time.
        predicted: what the simulator says for the measured costs and each step's microbatches.
        step_time: seconds from the first action to the last end.
        predicted_step_time: the simulator's.
    """

    measured: float
    predicted: float
    step_time: float
    predicted_step_time: float

    def __str__(self) -> str:
        return (
            f"bubble {100 * self.measured:.2f}% measured, {100 * self.predicted:.2f}% predicted; "
            f"step {1000 * self.step_time:.1f} ms measured, "
            f"{1000 * self.predicted_step_time:.1f} ms predicted"
        )


def report_bubble(ranks: Sequence[Sequence[Event]], schedule: Schedule) -> BubbleReport:
    """Compare what happened with what the simulator says.

    Args:
        ranks: what each pipeline rank did; the same steps on all.
        schedule: what they ran.
    """
    pp = len(ranks)
    costs = measured_costs(ranks)
    message = Costs(communication=measured_communication(ranks, schedule.placement(pp)))
    rows = []
    for iteration in sorted({event.iteration for event in ranks[0]}):
        events = [event for rank in ranks for event in rank if event.iteration == iteration]
        count = 1 + max(parse_action(event.action).microbatch for event in events)
        pipeline = build_pipeline(schedule, pp, count)
        predicted = simulate(
            pipeline.plans, pipeline.placement, message, pipeline.programs, own_costs=costs
        )
        span = max(e.end for e in events) - min(e.start for e in events)
        busy = sum(e.end - e.start for e in events)
        rows.append((1.0 - busy / (span * pp), predicted.bubble, span, predicted.step_time))
    return BubbleReport(*map(median, zip(*rows, strict=True)))


def measured_costs(ranks: Sequence[Sequence[Event]]) -> dict[tuple[int, int], Costs]:
    """For each (rank, chunk) the median time of its actions of each kind.

    Where some of a chunk's backwards are split, the others count as a split one with its W.

    Args:
        ranks: what each rank did.
    """
    costs = {}
    for rank, events in enumerate(ranks):
        times: dict[int, dict[Kind, list[float]]] = defaultdict(lambda: defaultdict(list))
        whole: dict[int, list[float]] = defaultdict(list)
        split = split_backwards(parse_action(event.action) for event in events)
        for event in events:
            action, seconds = parse_action(event.action), event.end - event.start
            is_whole = (action.chunk, action.microbatch) not in split
            if action.kind is Kind.BACKWARD and is_whole:
                whole[action.chunk].append(seconds)
            else:
                times[action.chunk][action.kind].append(seconds)
        for chunk, of in times.items():
            costs[rank, chunk] = Costs(
                max(_LEAST, median(of[Kind.FORWARD])),
                max(_LEAST, median(of[Kind.BACKWARD] or whole[chunk])),
                median(of[Kind.WEIGHT] or [0.0]),
            )
    return costs


def measured_communication(ranks: Sequence[Sequence[Event]], placement: StagePlacement) -> float:
    """Seconds that a message takes, from those that were waited for before they were sent.

    The mean over neighbours of what both directions take together, halved: where the clocks of two
    machines differ, one direction shows as much too much as the other too little.

    Args:
        ranks: what each rank did.
        placement: where the stages live.
    """
    found = {
        (event.iteration, rank, parse_action(event.action)): event
        for rank, events in enumerate(ranks)
        for event in events
    }
    gaps: dict[tuple[int, int], list[float]] = defaultdict(list)
    for (step, rank, action), event in found.items():
        message = incoming(placement, rank, action)
        if message is None or message.is_local:
            continue
        sent = found[step, message.source, message.producer].end
        if event.waited <= sent:
            gaps[message.source, rank].append(event.start - sent)
    both = [
        (median(there) + median(gaps[b, a])) / 2
        for (a, b), there in gaps.items()
        if a < b and (b, a) in gaps
    ]
    return max(0.0, mean(both)) if both else 0.0


def chrome_trace(ranks: Sequence[Sequence[Event]], report: BubbleReport) -> dict[str, Any]:
    """The trace-event format: one process a pipeline rank, times in microseconds."""
    first = min(event.waited for events in ranks for event in events)
    colors = {"F": "thread_state_running", "B": "rail_response", "W": "rail_animation"}
    trace: list[dict[str, Any]] = []
    for rank, events in enumerate(ranks):
        name = {"name": f"pipeline rank {rank}"}
        trace.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": name})
        for event in events:
            kind, chunk, microbatch = event.action[0], *event.action[1:].split(".")
            args = {
                "iteration": event.iteration,
                "chunk": int(chunk),
                "microbatch": int(microbatch),
            }
            for label, begin, end, color in (
                (f"wait for {event.action}", event.waited, event.start, "grey"),
                (event.action, event.start, event.end, colors[kind]),
            ):
                span = {"ts": 1e6 * (begin - first), "dur": 1e6 * (end - begin), "cname": color}
                trace.append(
                    {"ph": "X", "name": label, "pid": rank, "tid": 0, "args": args, **span}
                )
    return {
        "traceEvents": trace,
        "otherData": {
            "bubble_measured": report.measured,
            "bubble_predicted": report.predicted,
            "step_seconds_measured": report.step_time,
            "step_seconds_predicted": report.predicted_step_time,
        },
    }
