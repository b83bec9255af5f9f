"""How far a preprocessing run is, and how long it still takes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np

from tools.corpus_encoding import EncodedChunk
from tools.corpus_reading import STDIN, Chunk, Place

_LONGEST_ETA = 10**9  # seconds; a rate of almost nothing would leave the range of a timedelta


class Progress:
    """A line on stderr every so many documents.

    Args:
        interval: documents between two lines; 0 = none.
        paths: all input files.
        start: where an interrupted run goes on.
    """

    def __init__(self, interval: int, paths: Sequence[str], start: Place | None) -> None:
        # Bytes as stored that an earlier run has read: known with the first chunk of this one.
        self._skipped: int | None = 0 if start is None else None
        self._interval = interval
        self._start = time.monotonic()
        self._documents = self._tokens = self._bytes = 0
        sizes = [0 if path == STDIN else os.path.getsize(path) for path in paths]
        self._before: list[int] = np.cumsum([0, *sizes]).tolist()  # of each file of `paths`
        self._total = sum(sizes)

    def add(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        """Count a chunk that was written, and say how far the run is if it is time."""
        done = self._before[chunk.after.file] + chunk.stored
        if self._skipped is None:
            self._skipped = done
        part = next(iter(encoded.parts.values()))
        before, self._documents = self._documents, self._documents + len(part.sequence_counts)
        self._tokens += sum(len(part.tokens) for part in encoded.parts.values())
        self._bytes += encoded.text_bytes
        if self._interval and before // self._interval < self._documents // self._interval:
            seconds = max(time.monotonic() - self._start, 1e-9)
            print(
                f"Processed {self._documents} documents ({self._documents / seconds:.1f} docs/s, "
                f"{self._bytes / seconds / 2**20:.2f} MB/s, {self._tokens / seconds:.0f} tokens/s)"
                f"{self._remaining(done, done - self._skipped, seconds)}.",
                file=sys.stderr,
            )

    def _remaining(self, done: int, read: int, seconds: float) -> str:
        if not self._total:
            return ""
        text = f", {100 * done / self._total:.0f}% of the input"
        if read <= 0:
            return text
        left = min(seconds * max(self._total - done, 0) / read, _LONGEST_ETA)
        return f"{text}, ETA {timedelta(seconds=round(left))}"
