"""What a pipeline really did: a trace for Chrome or Perfetto, and its bubble beside the predicted.

Marks are taken on the host on the CPU, and on the device's stream on CUDA, where nothing waits for
them until the profile is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore import device
from mcore.log import get_logger, warn_ignored
from mcore.pipeline_parallel.actions import Action
from mcore.topology.collectives import all_gather_object
from mcore.training.initialize import Runtime
from mcore.training.pipeline_report import BubbleReport, Event, chrome_trace, report_bubble

#: The first step allocates memory and warms caches; the following ones are recorded.
_SKIPPED_STEPS = 1
_RECORDED_STEPS = 10


class PipelineProfile:
    """An observer of the executor that records a few steps of a run, and writes them at once.

    Args:
        path: the trace file.
        runtime: groups, device and schedule.
    """

    def __init__(self, path: str, runtime: Runtime) -> None:
        self._path = Path(path)
        self._runtime = runtime
        self._clock = device.Clock(runtime.device)
        self._steps = -_SKIPPED_STEPS - 1
        self._iteration = 0
        self._marks: list[tuple[int, Action, Any, Any, Any]] = []
        self._waited: Any = None
        self._is_written = False

    def begin_step(self, iteration: int) -> None:
        """A training step starts, which will be this iteration."""
        self._steps += 1
        self._iteration = iteration

    def end_step(self) -> None:
        """A training step has ended; after the last recorded one the trace is written.

        Comm: that of `write`.
        """
        if self._steps == _RECORDED_STEPS - 1:
            self.write()

    def close(self) -> None:
        """The run ends in good order: write what it has recorded, if that has not been done.

        Comm: that of `write`.
        """
        if not self._is_written:
            self.write()

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
            self._marks.append((self._iteration, action, self._waited, start, self._clock.mark()))

    def write(self) -> BubbleReport | None:
        """Write the trace of the pipeline of global rank 0, and log the bubble.

        Returns:
            On ranks of that pipeline the report; None elsewhere, or where nothing was recorded,
            which is told.

        Comm: one gather of host-side facts over the pipeline group.
        """
        own = [
            Event(iteration, str(action), *map(self._clock.seconds, marks))
            for iteration, action, *marks in self._marks
        ]
        self._marks, self._is_written = [], True
        ranks: list[list[Event]] = all_gather_object(own, self._runtime.ctx.pp)
        if 0 not in self._runtime.ctx.pp.ranks:
            return None
        if not all(ranks):
            if self._runtime.is_writer:
                warn_ignored("--profile-pipeline", "the first step of a start is not recorded")
            return None
        report = report_bubble(ranks, self._runtime.pipeline.schedule)
        if self._runtime.is_writer:
            get_logger().info("pipeline profile: %s; %s", report, self._write_trace(ranks, report))
        return report

    def _write_trace(self, ranks: list[list[Event]], report: BubbleReport) -> str:
        """Write the file, and say where it is; training goes on without one."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(chrome_trace(ranks, report)), encoding="utf-8")
        except OSError as error:
            return f"its trace, --profile-pipeline {self._path}, cannot be written: {error}"
        return f"trace in {self._path} (chrome://tracing, ui.perfetto.dev)"
