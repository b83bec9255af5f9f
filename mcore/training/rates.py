"""How fast a run is: figures of the steps since the last log line."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch

from mcore.config.run import Resolved, RunConfig
from mcore.topology.collectives import all_reduce_
from mcore.training.initialize import Runtime
from mcore.training.throughput import flops_per_token, peak


@dataclass(frozen=True, slots=True)
class Rates:
    """Figures of an interval; see docs/throughput.md.

    Attributes:
        steps: iterations of the interval.
        seconds: wall-clock time of one of them.
        tokens_per_second: positions of the global batch over that time, of the whole job.
        tflops: floating-point operations of the model over that time, per device, in 10^12.
        mfu: those over the device's peak; None where the peak is not known.
        data_wait: seconds of an iteration in which the slowest rank waited for its samples.
        remaining: seconds to the end at the pace since the start, with evaluations and saves.
    """

    steps: int
    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    data_wait: float
    remaining: float

    @property
    def eta(self) -> str:
        """The remaining time as days, hours, minutes and seconds."""
        return str(timedelta(seconds=round(self.remaining)))


class _Step(NamedTuple):
    """One step: its number, wall-clock seconds, positions of all ranks, wait of this one."""

    iteration: int
    seconds: float
    tokens: int
    data_wait: float


class RateMeter:
    """Sums steps and makes `Rates` of them.

    Args:
        config: the model.
        resolved: lengths.
        runtime: devices.
        iteration: finished iterations at the start.
    """

    def __init__(
        self, config: RunConfig, resolved: Resolved, runtime: Runtime, iteration: int
    ) -> None:
        self._runtime, self._resolved = runtime, resolved
        self.flops_per_token = flops_per_token(
            config.model, resolved.seq_length, config.tokenizer.vocab_size or 0
        )
        # Measured before the steps, whose time and memory it would disturb.
        writes = runtime.is_writer
        self._peak = peak(runtime.device, config.model.params_dtype) if writes else None
        self._began: float | None = None
        self._first = iteration
        self._taken: list[_Step] = []

    def start(self) -> None:
        """The first step is about to start."""
        if self._began is None:
            self._began = time.perf_counter()

    def add(self, iteration: int, seconds: float, sequences: int, data_wait: float) -> None:
        """Take a step.

        Args:
            iteration: its number.
            seconds: wall-clock time.
            sequences: rows of the global batch.
            data_wait: seconds in which this rank waited for them.
        """
        tokens = sequences * self._resolved.seq_length
        self._taken.append(_Step(iteration, seconds, tokens, data_wait))

    def rewind(self, iteration: int) -> None:
        """Forget the steps after an iteration."""
        self._taken = [step for step in self._taken if step.iteration <= iteration]
        if iteration < self._first:  # nothing that was done since the start counts any more
            self._first, self._began = iteration, None

    @property
    def steps(self) -> int:
        """Steps since the last `take`."""
        return len(self._taken)

    def take(self, iteration: int) -> Rates:
        """Figures of the steps since the last call, of which there is at least one.

        Comm: one all-reduce of a number over all ranks' hosts.
        """
        taken, self._taken = self._taken, []
        mean_wait = sum(step.data_wait for step in taken) / len(taken)
        waited = torch.tensor([mean_wait], dtype=torch.float64, device="cpu")
        longest = float(all_reduce_(waited, self._runtime.host, "max"))
        seconds = max(sum(step.seconds for step in taken), 1e-9)
        tokens_per_second = sum(step.tokens for step in taken) / seconds
        flops = self.flops_per_token * tokens_per_second / self._runtime.host.size
        return Rates(
            steps=len(taken),
            seconds=seconds / len(taken),
            tokens_per_second=tokens_per_second,
            tflops=flops / 1e12,
            mfu=None if self._peak is None else flops / self._peak,
            data_wait=longest,
            remaining=self._remaining(iteration),
        )

    def _remaining(self, iteration: int) -> float:
        if self._began is None or iteration == self._first:
            return 0.0
        pace = (time.perf_counter() - self._began) / (iteration - self._first)
        return pace * (self._resolved.train_iters - iteration)
