"""Masks and positions that follow from the end-of-document tokens of one sample.

Shapes: s = seq_length. All functions read the input tokens as they are in the file, before the pad
id is rewritten.
"""

from __future__ import annotations

import numpy as np


def document_starts(tokens: np.ndarray, eod_id: int) -> np.ndarray:
    """Positions where a document begins, int64 [documents], the first one 0.

    Args:
        tokens: input tokens, [s].
        eod_id: end-of-document id; it belongs to the document that it ends.
    """
    after_eod = np.flatnonzero(tokens[:-1] == eod_id) + 1
    return np.concatenate([np.zeros(1, np.int64), after_eod])


def reset_positions(tokens: np.ndarray, eod_id: int) -> np.ndarray:
    """Positions counted anew from every document start, int64 [s]."""
    starts = np.zeros(len(tokens), np.int64)
    begins = document_starts(tokens, eod_id)
    starts[begins] = begins
    return np.arange(len(tokens), dtype=np.int64) - np.maximum.accumulate(starts)


def hidden_mask(tokens: np.ndarray, eod_id: int | None) -> np.ndarray:
    """What attention must not see, bool [1, s, s]: row = query, True = hidden.

    Args:
        tokens: input tokens, [s].
        eod_id: hide earlier documents as well as the future; None = only the future.
    """
    positions = np.arange(len(tokens))
    hidden = positions[None, :] > positions[:, None]
    if eod_id is not None:
        is_start = np.zeros(len(tokens), np.int64)
        is_start[document_starts(tokens, eod_id)] = 1
        document = np.cumsum(is_start)
        hidden |= document[None, :] != document[:, None]
    return hidden[None]
