"""What a pipeline really did: a trace for Chrome or Perfetto, and its bubble beside the predicted.

Marks are taken on the host on the CPU, and on the device's stream on CUDA, where nothing waits for
them until the profile is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mcore import device
from mcore.log import get_logger
from mcore.pipeline_parallel import Costs, Kind, build_pipeline, simulate
from mcore.pipeline_parallel.actions import Action, split_backwards
from mcore.topology.collectives import all_gather_object
from mcore.training.initialize import Runtime

#: The first step allocates memory and warms caches; the following ones are recorded.
_SKIPPED_STEPS = 1
_RECORDED_STEPS = 10


class Event(NamedTuple):
    """One action of one rank in one step; times in seconds of the wall clock.

    Attributes:
        step: recorded step, from 0.
        action: its text.
        waited: when the rank began to wait for what the action needs.
        start: when it began to compute.
        end: when it was done.
    """

    step: int
    action: str
    waited: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class BubbleReport:
    """Measured beside predicted.

    Attributes:
        measured: idle over total rank-time, median of the recorded steps.
        predicted: what the simulator says for the measured costs.
        step_time: seconds from the first action to the last end, median of the recorded steps.
        predicted_step_time: the simulator's.
    """

    measured: float
    predicted: float
    step_time: float
    predicted_step_time: float


class PipelineProfile:
    """An observer of the executor that records a few steps of a run and writes them at its end.

    Args:
        path: the trace file.
        runtime: groups, device and schedule.
    """

    def __init__(self, path: str, runtime: Runtime) -> None:
        self._path = Path(path)
        self._runtime = runtime
        self._clock = device.Clock(runtime.device)
        self._steps = -_SKIPPED_STEPS - 1
        self._marks: list[tuple[int, Action, Any, Any, Any]] = []
        self._waited: Any = None

    def begin_step(self) -> None:
        """A training step starts."""
        self._steps += 1

    @property
    def is_recording(self) -> bool:
        """Whether the present step is one of those that are recorded."""
        return 0 <= self._steps < _RECORDED_STEPS

    @contextmanager
    def waiting(self, action: Action) -> Iterator[None]:
        """Mark where the wait begins."""
        del action
        if self.is_recording:
            self._waited = self._clock.mark()
        yield

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Mark where the action begins and ends."""
        start = self._clock.mark() if self.is_recording else None
        yield
        if start is not None:
            self._marks.append((self._steps, action, self._waited, start, self._clock.mark()))

    def write(self, num_microbatches: int) -> BubbleReport | None:
        """Write the trace of the pipeline of global rank 0, and log the bubble.

        Args:
            num_microbatches: of the recorded steps.

        Returns:
            On ranks of that pipeline the report; None elsewhere, or where nothing was recorded.

        Comm: one gather of host-side facts over the pipeline group.
        """
        own = [
            Event(step, str(action), *map(self._clock.seconds, marks))
            for step, action, *marks in self._marks
        ]
        ranks: list[list[Event]] = all_gather_object(own, self._runtime.ctx.pp)
        if 0 not in self._runtime.ctx.pp.ranks or not all(ranks):
            return None
        report = self._report(ranks, num_microbatches)
        if self._runtime.is_writer:
            self._path.write_text(json.dumps(chrome_trace(ranks, report)), encoding="utf-8")
            get_logger().info(
                "pipeline profile: bubble %.2f%% measured, %.2f%% predicted; step %.1f ms "
                "measured, %.1f ms predicted; trace in %s (chrome://tracing, ui.perfetto.dev)",
                100 * report.measured,
                100 * report.predicted,
                1000 * report.step_time,
                1000 * report.predicted_step_time,
                self._path,
            )
        return report

    def _report(self, ranks: Sequence[Sequence[Event]], num_microbatches: int) -> BubbleReport:
        plan = self._runtime.pipeline
        pipeline = build_pipeline(plan.schedule, plan.placement.num_ranks, num_microbatches)
        costs = measured_costs(ranks, any(map(split_backwards, pipeline.plans)))
        predicted = simulate(pipeline.plans, plan.placement, costs, pipeline.programs)
        spans, bubbles = [], []
        for step in sorted({event.step for event in ranks[0]}):
            events = [event for rank in ranks for event in rank if event.step == step]
            span = max(e.end for e in events) - min(e.start for e in events)
            busy = sum(e.end - e.start for e in events)
            spans.append(span)
            bubbles.append(1.0 - busy / (span * len(ranks)))
        return BubbleReport(median(bubbles), predicted.bubble, median(spans), predicted.step_time)


def measured_costs(ranks: Sequence[Sequence[Event]], is_split: bool) -> Costs:
    """Mean over ranks of the median time of an action of each kind.

    Args:
        ranks: what each rank did.
        is_split: backwards are split; otherwise all their time counts as `backward`.
    """

    def cost(kind: Kind) -> float:
        times = [
            [e.end - e.start for e in events if e.action.startswith(kind.value)] for events in ranks
        ]
        return sum(median(of_rank) for of_rank in times) / len(times)

    weight = cost(Kind.WEIGHT) if is_split else 0.0
    return Costs(cost(Kind.FORWARD), cost(Kind.BACKWARD), weight, 0.0)


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
            args = {"step": event.step, "chunk": int(chunk), "microbatch": int(microbatch)}
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
