"""A blend in the stable order: each corpus keeps its own cursor when weights change.

The run is a sequence of segments, each with its weights and, for every corpus, the number of its
samples that were drawn before. Inside a segment the draws follow the rule of `blend_order`. Which
samples were drawn up to sample c is thus known from the segments alone: a new segment at c, with
other weights, further corpora or fewer, goes on where each corpus stood.

A corpus is known by what its samples are made of (`corpus_identity`), not by its path: one that
was moved, or is spelled otherwise, keeps its cursor.
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
from mcore.log import get_logger, warn_alike


class StableBlend(DelegatingDataset):
    """Draws from endless data sets.

    Args:
        datasets: by name of the corpus; each has as many samples as are ever asked for.
        identities: of each corpus, by the same names.
        weights: shares of the samples, any scale, in the order of `datasets`.
        size: number of samples; it bounds what can be asked for and changes nothing else.
    """

    def __init__(
        self,
        datasets: Mapping[str, SampleDataset],
        identities: Mapping[str, str],
        weights: Sequence[float],
        size: int,
    ) -> None:
        self.datasets = dict(datasets)
        self._identities = dict(identities)
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
        if past:
            names = self._our_names(past[-1])
            past = [_renamed(segment, names) for segment in past]
        else:
            past = [{"start": 0, "weights": dict(self._weights), "cursors": {}}]
        if past[-1]["weights"] != self._weights:
            known = past[-1].get("identities", {})
            cursors = cursors_at(past[-1], consumed)
            past.append({"start": consumed, "weights": dict(self._weights), "cursors": cursors})
            past[-1]["identities"] = known
        past[-1]["identities"] = {**past[-1].get("identities", {}), **self._identities}
        self._segments = past
        self._draws: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        return past

    def _our_names(self, last: Mapping[str, Any]) -> dict[str, str]:
        """What each corpus of an earlier run is called now; says what changed."""
        known: dict[str, str | None] = dict.fromkeys((*last["weights"], *last["cursors"]))
        known.update(last.get("identities", {}))
        names = match_corpora(known, self._identities)
        for old, new in names.items():
            if old != new and new in self._identities:
                get_logger().info("%s was %s before: it goes on where that stood", new, old)
            elif (
                old == new
                and new in self._identities
                and known[old]
                not in (
                    None,
                    self._identities[new],
                )
            ):
                warn_alike(
                    "%s is not what it was (other documents, or another seed, split or sequence "
                    "length): its order is another one, and samples that were consumed can come "
                    "again",
                    new,
                )
        added = sorted(self._identities.keys() - names.values())
        gone = sorted(old for old in last["weights"] if names[old] not in self._identities)
        for name in added:
            warn_alike("%s was not in the data before: it starts at its beginning", name)
        for name in gone:
            warn_alike("%s left the data: from here on no sample comes from it", name)
        return names

    def __len__(self) -> int:
        """The number of samples."""
        return self._size

    def missing_corpus(self, index: int) -> str | None:
        """The corpus that a sample was drawn from, if that has left the data; else None."""
        name, _ = self._drawn_from(index)
        return None if name in self.datasets else name

    def _locate(self, index: int) -> tuple[SampleDataset, int]:
        name, sample = self._drawn_from(index)
        if name not in self.datasets:
            raise DataError(
                f"sample {index} was drawn from {name}, which is no longer in the data path"
            )
        return self.datasets[name], sample

    def _drawn_from(self, index: int) -> tuple[str, int]:
        """The corpus of a sample, and its number there."""
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of a blend, which has {self._size}")
        number = bisect.bisect_right([s["start"] for s in self._segments], index) - 1
        segment = self._segments[number]
        corpora, samples = self._drawn(number)
        name = list(segment["weights"])[int(corpora[index - segment["start"]])]
        cursor = segment["cursors"].get(name, 0)
        return name, cursor + int(samples[index - segment["start"]])

    def _drawn(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        draws = self._draws  # before the segments: who reads ahead never mixes old ones with new
        if number not in draws:
            segment = self._segments[number]
            following = self._segments[number + 1 : number + 2]
            end = following[0]["start"] if following else self._size
            draws[number] = blend_order(
                list(segment["weights"].values()), max(0, end - segment["start"])
            )
        return draws[number]


def match_corpora(known: Mapping[str, str | None], ours: Mapping[str, str]) -> dict[str, str]:
    """What corpora of an earlier run are called in this one.

    The same name with the same identity comes first, then the same identity, then the same name. A
    corpus that is not found keeps its name, or a longer one where a corpus of ours has that.

    Args:
        known: identities of the earlier run's corpora by name; None = not noted.
        ours: identities of this run's corpora by name.
    """
    names: dict[str, str] = {}
    free = dict(ours)
    for same_name, same_identity in ((True, True), (False, True), (True, False)):
        for old, identity in known.items():
            found = next(
                (
                    new
                    for new, own in free.items()
                    if (new == old or not same_name) and (own == identity or not same_identity)
                ),
                None,
            )
            if old not in names and found is not None:
                names[old] = found
                del free[found]
    for old in known.keys() - names.keys():
        name = old
        while name in ours or name in names.values():
            name += " (before)"
        names[old] = name
    return names


def _renamed(segment: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    by_corpus = ("weights", "cursors", "identities")
    return {
        key: {names[name]: number for name, number in value.items()} if key in by_corpus else value
        for key, value in segment.items()
    }


def cursors_at(segment: Mapping[str, Any], consumed: int) -> dict[str, int]:
    """Samples of every corpus that were drawn before sample `consumed` of the run."""
    names = list(segment["weights"])
    corpora, _ = blend_order(list(segment["weights"].values()), consumed - segment["start"])
    drawn = np.bincount(corpora, minlength=len(names)).tolist()
    cursors: dict[str, int] = dict(segment["cursors"])
    for name, count in zip(names, drawn, strict=True):
        cursors[name] = cursors.get(name, 0) + count
    return cursors
