"""Micro batches by a budget of tokens: variable numbers of conversations, no fixed sample length.

A global batch is still a number of conversations, consumed in the order of `packed_dataset`. They
are packed into rows of the budget's length, whole conversations only, and the rows dealt to the
data-parallel ranks in turn; a rank that gets one row less computes an empty one. Rows depend on the
batch alone, so that every layout computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from mcore.data.conversations import Conversations
from mcore.data.gpt_dataset import Sample, SamplePiece
from mcore.data.masks import hidden_mask
from mcore.data.packed_dataset import fill, pack
from mcore.errors import DataError


class BudgetedConversations:
    """Conversations one by one, and as rows of a token budget.

    Args:
        conversations: the data.
        chosen: numbers of the conversations of this split, [chosen].
        num_samples: conversations wanted; None = one epoch.
        max_length: places of the longest conversation; longer ones are cut.
        budget: tokens of a row.
        seed: of the order.
        pad_id: token of the padding; it has no loss.

    Raises:
        DataError: no conversation, or a budget that does not hold the longest.
    """

    def __init__(
        self,
        conversations: Conversations,
        chosen: np.ndarray,
        num_samples: int | None,
        *,
        max_length: int,
        budget: int,
        seed: int,
        pad_id: int,
    ) -> None:
        if len(chosen) == 0:
            raise DataError(
                f"a split of the fine-tuning data ({conversations.origin[0][0]}) holds no "
                "conversation; give it a larger share in --split"
            )
        if budget < max_length:
            raise DataError(
                f"--max-tokens-per-microbatch ({budget}) must hold the longest conversation, "
                f"--seq-length ({max_length})"
            )
        self._data, self._chosen = conversations, chosen
        self._length = len(chosen) if num_samples is None else num_samples
        self._max_length, self.budget = max_length, budget
        self._seed, self._pad = seed, pad_id
        self._places = np.minimum(np.diff(conversations.starts) - 1, max_length)
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def __len__(self) -> int:
        """The number of conversations that training consumes."""
        return self._length

    def __getitem__(self, index: int) -> Sample:
        """Conversation `index` of the order in a row of its own."""
        return self.row(self._members(index, 1))

    def row(self, members: np.ndarray) -> Sample:
        """The conversations of a row (perhaps none) and padding; arrays are [budget]."""
        return fill(self._data, members, self.budget, self._pad, self._max_length)

    def rows(self, consumed: int, count: int) -> list[np.ndarray]:
        """The rows of a global batch: numbers of the conversations in each.

        Args:
            consumed: conversations before the batch.
            count: conversations of the batch.
        """
        return pack(self._members(consumed, count), self._places, self.budget)

    def num_microbatches(self, consumed: int, count: int, data_parallel_size: int) -> int:
        """Rows that each data-parallel rank computes for a global batch."""
        return -(-len(self.rows(consumed, count)) // data_parallel_size)

    def provenance(self, index: int) -> tuple[SamplePiece, ...]:
        """File, line number (from 1) and tokens of conversation `index`."""
        (member,) = self._members(index, 1).tolist()
        path, line = self._data.origin[member]
        return (SamplePiece(path, line, 0, int(self._places[member]) + 1),)

    def attention_mask(self, index: int) -> np.ndarray:
        """What attention must not see, bool [1, budget, budget], True = hidden."""
        document = np.cumsum(self[index]["is_document_start"])
        future: np.ndarray = hidden_mask(document, None)
        return future | (document[None, :, None] != document[None, None, :])

    def document_starts(self, index: int) -> np.ndarray:
        """Positions of a row where a conversation or the padding begins, int64."""
        return np.flatnonzero(self[index]["is_document_start"])

    def _members(self, first: int, count: int) -> np.ndarray:
        """Numbers of conversations [first, first + count) of the order."""
        if not 0 <= first <= first + count <= self._length:
            raise DataError(
                f"conversations {first} to {first + count - 1} of {self._length} are wanted"
            )
        size = len(self._chosen)
        parts = []
        while count:
            epoch, at = divmod(first, size)
            parts.append(self._epoch(epoch)[at : at + count])
            first, count = first + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)

    def _shuffled(self, epoch: int) -> np.ndarray:
        order = self._chosen.copy()
        np.random.RandomState([self._seed, epoch]).shuffle(order)
        return order


def rank_rows(
    dataset: BudgetedConversations, consumed: int, count: int, rank: int, size: int
) -> Iterator[tuple[int, Sample]]:
    """One data-parallel rank's (row number, row) pairs of a global batch, one a micro batch."""
    rows = dataset.rows(consumed, count)
    nothing = np.empty(0, np.int64)
    for number in range(rank, -(-len(rows) // size) * size, size):
        yield number, dataset.row(rows[number] if number < len(rows) else nothing)
