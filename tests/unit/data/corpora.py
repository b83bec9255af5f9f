"""Corpora for the data tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcore.data import IndexedDatasetBuilder

GOLDEN = Path(__file__).parents[2] / "golden" / "data"


def write_corpus(prefix: Path, documents: Sequence[Sequence[int]], dtype=np.uint16) -> str:
    """One sequence per document; returns the prefix as a string."""
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype) as builder:
        for document in documents:
            builder.add_item(document)
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def counting_corpus(prefix: Path, lengths: Sequence[int]) -> str:
    """Documents of the given lengths whose tokens count 0, 1, 2, ... through the whole corpus."""
    ends = np.cumsum(lengths)
    rows = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return write_corpus(prefix, [list(row) for row in rows], np.int32)
