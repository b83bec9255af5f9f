"""Conversations packed into samples of one length, with the documents marked.

A conversation of n tokens takes n - 1 places: every token but the last is an input, the next one
its label, so no label belongs to another conversation. Each epoch shuffles the conversations by
(seed, epoch) and fills one sample after another with as many whole conversations as fit; the rest
of a sample is padding without loss. Conversations longer than a sample are cut at its end.
"""

from __future__ import annotations

import numpy as np

from mcore.data.conversations import Conversations
from mcore.data.gpt_dataset import Sample, SamplePiece
from mcore.data.masks import hidden_mask
from mcore.errors import DataError
from mcore.log import warn_alike


class PackedConversations:
    """Samples of `seq_length` tokens.

    Args:
        conversations: what is packed.
        chosen: numbers of the conversations of this split, [chosen].
        num_samples: samples wanted; None = one epoch.
        seq_length: tokens per sample.
        seed: of the order.
        pad_id: token of the padding; it has no loss.

    Raises:
        DataError: no conversation to pack.
    """

    def __init__(
        self,
        conversations: Conversations,
        chosen: np.ndarray,
        num_samples: int | None,
        *,
        seq_length: int,
        seed: int,
        pad_id: int,
    ) -> None:
        if len(chosen) == 0:
            raise DataError(
                f"a split of the fine-tuning data ({conversations.origin[0][0]}) holds none of its "
                f"{len(conversations)} conversations; give it a larger share in --split"
            )
        self._data, self._seq_length, self._pad = conversations, seq_length, pad_id
        places = np.diff(conversations.starts) - 1
        cut = int(np.count_nonzero(places[chosen] > seq_length))
        if cut:
            warn_alike(
                "%d of %d conversations are longer than a sample of %d tokens and are cut",
                cut,
                len(chosen),
                seq_length,
            )
        self._places = np.minimum(places, seq_length)
        self._packed: list[np.ndarray] = []
        epoch = 0
        while not self._packed or (num_samples is not None and len(self._packed) < num_samples):
            order = chosen.copy()
            np.random.RandomState([seed, epoch]).shuffle(order)
            self._packed += pack(order, self._places, seq_length)
            epoch += 1

    def __len__(self) -> int:
        """The number of samples; it may exceed what was asked for."""
        return len(self._packed)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`; IndexError when there is none."""
        return fill(self._data, self._members(index), self._seq_length, self._pad)

    def provenance(self, index: int) -> tuple[SamplePiece, ...]:
        """File, line number (from 1) and tokens of each conversation, in order."""
        pieces = []
        for member in self._members(index).tolist():
            path, line = self._data.origin[member]
            pieces.append(SamplePiece(path, line, 0, int(self._places[member]) + 1))
        return tuple(pieces)

    def attention_mask(self, index: int) -> np.ndarray:
        """What attention must not see, bool [1, s, s], True = hidden."""
        starts = self[index]["is_document_start"]
        document = np.cumsum(starts)
        future: np.ndarray = hidden_mask(document, None)
        return future | (document[None, :, None] != document[None, None, :])

    def document_starts(self, index: int) -> np.ndarray:
        """Positions of a sample where a conversation or the padding begins, int64."""
        return np.flatnonzero(self[index]["is_document_start"])

    def _members(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self._packed):
            raise IndexError(f"sample {index} of fine-tuning data, which has {len(self._packed)}")
        return self._packed[index]


def pack(order: np.ndarray, places: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Conversations in order, cut into runs whose places fit the capacity.

    Args:
        order: numbers of the conversations, [chosen].
        places: places that each conversation of the data takes, at most `capacity`.
        capacity: places of a sample.
    """
    ends = np.cumsum(places[order])
    packed = []
    first, used = 0, 0
    while first < len(order):
        last = int(np.searchsorted(ends, used + capacity, "right"))
        packed.append(order[first:last])
        first, used = last, int(ends[last - 1])
    return packed


def fill(
    data: Conversations,
    members: np.ndarray,
    length: int,
    pad_id: int,
    max_length: int | None = None,
) -> Sample:
    """One sample: the conversations end to end, each cut at `max_length` places, then padding."""
    tokens = np.full(length, pad_id, np.int64)
    labels = np.full(length, pad_id, np.int64)
    loss_mask = np.zeros(length, np.float32)
    positions = np.zeros(length, np.int64)
    is_start = np.zeros(length, np.bool_)
    at = 0
    for member in members.tolist():
        start = int(data.starts[member])
        count = min(int(data.starts[member + 1]) - start - 1, max_length or length, length - at)
        if count == 0:
            continue
        here = slice(at, at + count)
        tokens[here] = data.ids[start : start + count]
        labels[here] = data.ids[start + 1 : start + 1 + count]
        loss_mask[here] = data.trained[start + 1 : start + 1 + count]
        positions[here] = np.arange(count)
        is_start[at] = True
        at += count
    if at < length:
        is_start[at] = True
    return {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": positions,
        "is_document_start": is_start,
    }
