"""What a corpus is known by when its path is another one."""

from __future__ import annotations

import hashlib

from mcore.data.gpt_dataset import SampleOptions
from mcore.data.indexed_dataset import IndexedDataset

_PROBES = 16
_PROBED_TOKENS = 64


def corpus_identity(indexed: IndexedDataset, chosen: range, options: SampleOptions) -> str:
    """A hash of what decides on the samples in the stable order; the path is no part of it.

    Args:
        indexed: the corpus.
        chosen: the sequences of the split; all their lengths count, and tokens of some.
        options: of which seed and sample length count.
    """
    cut = f"{options.seed} {options.seq_length} {options.add_extra_token}"
    digest = hashlib.sha256(cut.encode())
    lengths = indexed.sequence_lengths[chosen.start : chosen.stop]
    digest.update(lengths.view("u1").data)
    for number in chosen[:: max(1, len(chosen) // _PROBES)]:
        length = min(int(indexed.sequence_lengths[number]), _PROBED_TOKENS)
        digest.update(indexed.get(number, 0, length).astype("<i8").data)
    return digest.hexdigest()[:16]
