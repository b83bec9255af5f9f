"""Training steps over micro batches of a token budget (`--max-tokens-per-microbatch`)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch

from mcore.data.batch_loader import Batch
from mcore.data.token_budget import BudgetedConversations, rank_rows
from mcore.num_microbatches_calculator import NumMicroBatchesCalculator


class TokenBudgetCalculator(NumMicroBatchesCalculator):
    """As many micro batches as the conversations of each global batch need.

    Args:
        dataset: the training data.
        global_batch_size: conversations of an optimizer step.
        data_parallel_size: number of data-parallel ranks.
    """

    def __init__(
        self, dataset: BudgetedConversations, global_batch_size: int, data_parallel_size: int
    ) -> None:
        super().__init__(1, data_parallel_size, False, 1)
        self._dataset = dataset
        self._global_batch_size = global_batch_size

    def update(
        self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False
    ) -> None:
        """Look at the global batch that starts after `consumed_samples` conversations."""
        del consistency_check, verbose
        count = self._global_batch_size
        self.current_global_batch_size = self.current_running_global_batch_size = count
        self.num_micro_batches = self._dataset.num_microbatches(
            consumed_samples, count, self.data_parallel_size
        )

    def global_batch_size_at(self, consumed_samples: int) -> int:  # noqa: ARG002  (constant)
        """Conversations of an optimizer step."""
        return self._global_batch_size

    def global_batch_sizes(self) -> Sequence[int]:
        """The one."""
        return (self._global_batch_size,)


class TokenBudgetLoader:
    """Endless micro batches of one rank: one row each, [1, budget].

    Args:
        dataset: the training data.
        global_batch_size: conversations of an optimizer step.
        consumed: conversations that all ranks consumed before.
        rank: place in the data-parallel group.
        size: ranks of the group.
    """

    def __init__(
        self,
        dataset: BudgetedConversations,
        global_batch_size: int,
        consumed: int,
        rank: int,
        size: int,
    ) -> None:
        self._dataset, self._count, self._consumed = dataset, global_batch_size, consumed
        self._rank, self._size = rank, size
        self._batches = self._all()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next row; `sample_index` is the same for every layout."""
        return next(self._batches)

    def seek(self, consumed: int) -> None:
        """Go on after so many conversations, ahead or back."""
        self._batches.close()
        self._consumed = consumed
        self._batches = self._all()

    def close(self) -> None:
        """Nothing is read ahead."""
        self._batches.close()

    def _all(self) -> Generator[Batch, None, None]:
        consumed = self._consumed
        while True:
            rows = rank_rows(self._dataset, consumed, self._count, self._rank, self._size)
            for number, row in rows:
                batch = {name: torch.from_numpy(array)[None] for name, array in row.items()}
                batch["sample_index"] = torch.tensor([consumed + number])
                yield batch
            consumed += self._count
