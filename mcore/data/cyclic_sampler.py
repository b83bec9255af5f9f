"""Megatron's `--dataloader-type cyclic`: every epoch in another random order.

An epoch is the data set without the samples that fill no micro-batch of all ranks. Its order is
`torch.randperm` seeded by the epoch's number, either of the whole (the same order for every layout
that leaves the same samples out) or, with data sharding, of each data-parallel rank's own part.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from mcore.errors import DataError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CyclicSampler:
    """Which samples a data-parallel rank reads; a run resumes from its consumed samples.

    Attributes:
        total_samples: samples of the data set.
        micro_batch_size: samples of one micro-batch of one rank.
        data_parallel_rank: this rank's place in the data-parallel group.
        data_parallel_size: ranks of the group.
        data_sharding: a rank reads its own part of the data set, and no other.

    Raises:
        DataError: fewer samples than one micro-batch of all ranks.
    """

    total_samples: int
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    data_sharding: bool = True

    def __post_init__(self) -> None:
        if self.total_samples < self.samples_per_step:
            raise DataError(
                f"the data set has {self.total_samples} samples, fewer than one micro-batch of "
                f"{self.micro_batch_size} for each of {self.data_parallel_size} ranks"
            )

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks together consume per micro-batch."""
        return self.micro_batch_size * self.data_parallel_size

    def microbatch(self, consumed_samples: int) -> list[int]:
        """The samples of one micro-batch of this rank.

        Args:
            consumed_samples: samples that all ranks have consumed before.

        Raises:
            DataError: that is no whole number of micro-batches of all ranks.
        """
        step = self.samples_per_step
        epoch, used = divmod(consumed_samples, self.total_samples // step * step)
        if used % step:
            raise DataError(
                f"{consumed_samples} samples were consumed, {used} of them in this epoch, which is "
                f"no multiple of micro-batch size x data-parallel size = {step}; resume with sizes "
                "that divide it"
            )
        if self.data_sharding:
            part = self.total_samples // step * self.micro_batch_size
            first = self.data_parallel_rank * part
            begin = used // self.data_parallel_size
            chosen = _permutation(part, epoch)[begin : begin + self.micro_batch_size] + first
        else:
            whole = self.total_samples // self.micro_batch_size * self.micro_batch_size
            order = _permutation(whole, epoch)[used : used + step]
            chosen = order[self.data_parallel_rank :: self.data_parallel_size]
        return [int(number) for number in chosen]

    def positions(self, consumed_samples: int) -> range:
        """The places of `microbatch`'s samples in the stream of the whole run."""
        if self.data_sharding:
            first = consumed_samples + self.data_parallel_rank * self.micro_batch_size
            return range(first, first + self.micro_batch_size)
        return range(
            consumed_samples + self.data_parallel_rank,
            consumed_samples + self.samples_per_step,
            self.data_parallel_size,
        )


@functools.lru_cache(maxsize=2)
def _permutation(size: int, epoch: int) -> np.ndarray:
    # Imported here: the tools that never use it start without torch.
    import torch

    generator = torch.Generator()
    generator.manual_seed(epoch)
    order: np.ndarray = torch.randperm(size, generator=generator).numpy()
    return order
