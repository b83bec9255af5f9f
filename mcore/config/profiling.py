"""Which iterations are profiled, on which ranks and how."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mcore.config.fields import flag, refuse


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilingConfig:
    """Profiling options, in Megatron's spellings.

    Raises:
        ConfigError: an empty range of iterations, or options that need others.
    """

    profile: bool = flag(
        False,
        help="Profile the iterations of --profile-step-start and --profile-step-end: ranges for "
        "Nsight Systems (nsys profile --capture-range=cudaProfilerApi), or with "
        "--use-pytorch-profiler a trace.",
    )
    use_pytorch_profiler: bool = flag(
        False,
        help="With --profile: torch's profiler, which writes one trace a rank into the TensorBoard "
        "directory, or into ./profile without one. It works on the CPU too.",
    )
    profile_step_start: int = flag(10, help="Profiling starts after this many iterations.")
    profile_step_end: int = flag(12, help="Profiling ends after this many iterations.")
    profile_ranks: tuple[int, ...] = flag((0,), help="Ranks that are profiled.", metavar="N")
    record_memory_history: bool = flag(
        False,
        help="Record every allocation of the profiled ranks' GPUs, and write the history when the "
        "run ends or fails.",
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle",
        metavar="FILE",
        help="Memory history, for pytorch.org/memory_viz; the rank is put before the ending.",
    )

    @property
    def memory_snapshot(self) -> str | None:
        """Where the memory's history is written, if it is recorded."""
        return self.memory_snapshot_path if self.record_memory_history else None

    def __post_init__(self) -> None:
        refuse(self._problems())

    def without_cuda(self) -> Iterator[str]:
        """What is wrong with the options where there is no CUDA."""
        if self.profile and not self.use_pytorch_profiler:
            yield (
                "--profile alone marks iterations for Nsight Systems, which needs CUDA; add "
                "--use-pytorch-profiler"
            )
        if self.record_memory_history:
            yield "--record-memory-history needs CUDA: torch records no CPU memory"

    def wrong_ranks(self, world_size: int) -> Iterator[str]:
        """What is wrong with the options in a job of so many processes."""
        is_on = self.profile or self.record_memory_history
        if is_on and not all(0 <= rank < world_size for rank in self.profile_ranks):
            yield (
                f"--profile-ranks {' '.join(map(str, self.profile_ranks))}: the job has ranks 0 to "
                f"{world_size - 1}"
            )

    def _problems(self) -> Iterator[str]:
        if self.profile_step_start < 0 or self.profile_step_end <= self.profile_step_start:
            yield (
                f"`profile_step_end` ({self.profile_step_end}) must be above `profile_step_start` "
                f"({self.profile_step_start}), which counts from 0"
            )
        if self.use_pytorch_profiler and not self.profile:
            yield "`use_pytorch_profiler` needs `profile`: give --profile too"
