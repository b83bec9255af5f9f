"""Which samples a data-parallel rank reads: pure arithmetic on the consumed samples.

Blocks of micro_batch_size * dp_size consecutive samples are cut into dp_size micro-batches in rank
order. So a global batch is the same set of samples for every micro-batch size and dp size, and a
run resumes at any layout from the number of consumed samples alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from mcore.errors import DataError


class Sampler(Protocol):
    """Says which samples each micro-batch of this rank has."""

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks together consume per micro-batch."""

    def microbatch(self, consumed_samples: int) -> Sequence[int]:
        """Numbers of the samples in the data set, after `consumed_samples` of all ranks."""

    def positions(self, consumed_samples: int) -> range:
        """Their places in the stream of the whole run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SingleSampler:
    """Megatron's `--dataloader-type single`: every sample once, in order.

    Attributes:
        total_samples: samples of the data set; None = no end is checked.
        micro_batch_size: samples of one micro-batch of one rank.
        data_parallel_rank: this rank's place in the data-parallel group.
        data_parallel_size: ranks of the group.
    """

    total_samples: int | None
    micro_batch_size: int
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1 or not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise DataError(
                f"micro-batch size {self.micro_batch_size}, rank {self.data_parallel_rank} of "
                f"{self.data_parallel_size} is no data-parallel layout"
            )

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks together consume per micro-batch."""
        return self.micro_batch_size * self.data_parallel_size

    def positions(self, consumed_samples: int) -> range:
        """The places of `microbatch`'s samples in the stream of the whole run."""
        return self.microbatch(consumed_samples)

    def microbatch(self, consumed_samples: int, number: int = 0) -> range:
        """The samples of one micro-batch of this rank.

        Args:
            consumed_samples: samples that all ranks have consumed before.
            number: which micro-batch after those, from 0.

        Raises:
            DataError: the data set ends before this block of samples does.
        """
        start = consumed_samples + number * self.samples_per_step
        stop = start + self.samples_per_step
        if self.total_samples is not None and stop > self.total_samples:
            raise DataError(
                f"the data set has {self.total_samples} samples, and samples {start} to "
                f"{stop - 1} are wanted; train for fewer iterations, or ask the data set for more "
                "samples (corpora without weights are not repeated: give them weights)"
            )
        first = start + self.data_parallel_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)
