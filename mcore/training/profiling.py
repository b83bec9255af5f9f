"""Profiles of a few iterations: torch's trace, ranges for Nsight Systems, memory history."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mcore import device
from mcore.config.profiling import ProfilingConfig
from mcore.errors import ConfigError
from mcore.log import get_logger
from mcore.pipeline_parallel.actions import Action


class Profiler:
    """Watches the profiled iterations of one rank; an observer of the pipeline executor.

    Args:
        options: which iterations and ranks, and how.
        folder: where traces go.
        where: the rank's device.
        rank: this rank.
    """

    def __init__(
        self,
        options: ProfilingConfig,
        folder: Path,
        where: torch.device,
        rank: int,
    ) -> None:
        self._options, self._folder, self._rank = options, folder, rank
        self._device = where
        self._is_mine = rank in options.profile_ranks
        self._profile: profile | None = None
        self._ranges: AbstractContextManager[object] | None = None
        self._first: int | None = None
        self._records_memory = options.record_memory_history and self._is_mine
        if self._records_memory:
            device.record_memory_history()

    @property
    def is_on(self) -> bool:
        """Whether the present iteration is profiled here."""
        return self._profile is not None or self._ranges is not None

    def before(self, iteration: int) -> None:
        """A step is about to start after this many iterations."""
        options = self._options
        if not (options.profile and self._is_mine):
            return
        if iteration >= options.profile_step_end:
            self._miss(iteration)
            return
        # A step may be run again, and a run may be resumed inside the range.
        if iteration < options.profile_step_start or self._first is not None:
            return
        self._first = iteration + 1
        if options.use_pytorch_profiler:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=True)
            self._profile.start()
            return
        self._ranges = device.start_capture()

    def _miss(self, iteration: int) -> None:
        """The range is over: stop, should its last iterations have been passed over."""
        if self.is_on:
            self._stop(iteration)
        elif self._first is None:
            self._first = iteration + 1
            get_logger().warning(
                "nothing is profiled: the run goes on after iteration %d, and --profile-step-end "
                "is %d",
                iteration,
                self._options.profile_step_end,
            )

    def after(self, iteration: int) -> None:
        """A step has ended, as this iteration."""
        if self.is_on and iteration >= self._options.profile_step_end:
            self._stop(iteration)

    def close(self) -> None:
        """The run is over or has failed: write what there is."""
        if self.is_on:
            self._stop(None)
        if self._records_memory:
            path = Path(self._options.memory_snapshot_path)
            path = path.with_name(f"{path.stem}.rank{self._rank}{path.suffix}")
            device.dump_memory_history(path)
            get_logger().info("memory history of rank %d: %s", self._rank, path)

    def _stop(self, iteration: int | None) -> None:
        if self._ranges is not None:
            device.stop_capture(self._ranges)
            self._ranges = None
        if self._profile is None:
            return
        self._profile.stop()
        first = self._first
        last = "end" if iteration is None else iteration
        name = f"rank{self._rank}.iterations{first}-{last}.pt.trace.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._folder / name))
        except OSError as error:
            raise ConfigError(f"the profile cannot be written: {error}") from error
        self._profile = None
        get_logger().info("profile of rank %d: %s", self._rank, self._folder / name)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A named range of the profile; nothing while it is off."""
        return record_function(name) if self.is_on else nullcontext()

    def waiting(self, action: Action) -> AbstractContextManager[None]:
        """Around the wait for what an action needs from another rank."""
        return self.phase(f"wait for {action}") if self.is_on else nullcontext()

    def running(self, action: Action) -> AbstractContextManager[None]:
        """Around an action itself."""
        return self.phase(str(action)) if self.is_on else nullcontext()
