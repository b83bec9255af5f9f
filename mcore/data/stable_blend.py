"""A blend in the stable order: each corpus keeps its own cursor when weights change.

The run is a sequence of segments, each with its weights and, for every corpus, the number of its
samples that were drawn before. Inside a segment the draws follow the rule of `blend_order`. Which
samples were drawn up to sample c is thus known from the segments alone: a new segment at c, with
other weights, further corpora or fewer, goes on where each corpus stood.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mcore.data.blend import blend_order, normalise
from mcore.data.delegating_dataset import DelegatingDataset
from mcore.data.gpt_dataset import SampleDataset
from mcore.errors import DataError


class StableBlend(DelegatingDataset):
    """Draws from endless data sets.

    Args:
        datasets: by name of the corpus; each has as many samples as are ever asked for.
        weights: shares of the samples, any scale, in the order of `datasets`.
        size: number of samples; it bounds what can be asked for and changes nothing else.
    """

    def __init__(
        self, datasets: Mapping[str, SampleDataset], weights: Sequence[float], size: int
    ) -> None:
        self.datasets = dict(datasets)
        self._weights = dict(zip(datasets, normalise(weights), strict=True))
        self._size = size
        self._segments: list[dict[str, Any]] = []
        self.restore([], 0)

    def restore(self, segments: Sequence[Mapping[str, Any]], consumed: int) -> list[dict[str, Any]]:
        """Go on from a run's segments, with this blend's weights from sample `consumed` on.

        Args:
            segments: what `restore` returned in the earlier run; none = a run from the start.
            consumed: samples that were drawn.

        Returns:
            The segments from now on, plain data to be kept with the checkpoint.
        """
        past = [dict(segment) for segment in segments if segment["start"] <= consumed]
        if not past:
            past = [{"start": 0, "weights": dict(self._weights), "cursors": {}}]
        if past[-1]["weights"] != self._weights:
            cursors = cursors_at(past[-1], consumed)
            past.append({"start": consumed, "weights": dict(self._weights), "cursors": cursors})
        self._segments = past
        self._draws: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        return past

    def __len__(self) -> int:
        """The number of samples."""
        return self._size

    def _locate(self, index: int) -> tuple[SampleDataset, int]:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of a blend, which has {self._size}")
        number = bisect.bisect_right([s["start"] for s in self._segments], index) - 1
        segment = self._segments[number]
        corpora, samples = self._drawn(number)
        name = list(segment["weights"])[int(corpora[index - segment["start"]])]
        if name not in self.datasets:
            raise DataError(
                f"sample {index} was drawn from {name}, which is no longer in the data path"
            )
        cursor = segment["cursors"].get(name, 0)
        return self.datasets[name], cursor + int(samples[index - segment["start"]])

    def _drawn(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number not in self._draws:
            segment = self._segments[number]
            following = self._segments[number + 1 : number + 2]
            end = following[0]["start"] if following else self._size
            self._draws[number] = blend_order(
                list(segment["weights"].values()), max(0, end - segment["start"])
            )
        return self._draws[number]


def cursors_at(segment: Mapping[str, Any], consumed: int) -> dict[str, int]:
    """Samples of every corpus that were drawn before sample `consumed` of the run."""
    names = list(segment["weights"])
    corpora, _ = blend_order(list(segment["weights"].values()), consumed - segment["start"])
    drawn = np.bincount(corpora, minlength=len(names)).tolist()
    cursors: dict[str, int] = dict(segment["cursors"])
    for name, count in zip(names, drawn, strict=True):
        cursors[name] = cursors.get(name, 0) + count
    return cursors
