"""The perplexity of a model that knows word frequencies and nothing else: the demo's yardstick."""

from __future__ import annotations

import math

import numpy as np

from mcore.data.indexed_dataset import IndexedDataset


def unigram_perplexity(train: np.ndarray, valid: np.ndarray, vocab_size: int) -> float:
    """Perplexity of validation tokens under the training tokens' frequencies.

    Every id's count is one more than seen (add-one smoothing), so an unseen token is no surprise
    without bound.

    Args:
        train: token ids that are counted, [number of training tokens].
        valid: token ids that are predicted, [number of validation tokens], at least one.
        vocab_size: number of ids, before padding.
    """
    counts = np.bincount(train, minlength=vocab_size) + 1
    surprise = math.log(counts.sum()) - np.log(counts)[valid]
    return math.exp(surprise.mean())


def read_tokens(prefix: str, first: int = 0, stop: int | None = None) -> np.ndarray:
    """Tokens of the sequences `first` to `stop` of PREFIX.bin and .idx, as int64, end to end."""
    dataset = IndexedDataset(prefix)
    chosen = range(len(dataset))[first:stop]
    return np.concatenate([np.empty(0, np.int64), *(dataset[i].astype(np.int64) for i in chosen)])
