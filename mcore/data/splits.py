"""The split string: which sequences of a corpus are training, validation and test."""

from __future__ import annotations

import re

import numpy as np

from mcore.errors import DataError

SPLIT_NAMES = ("train", "valid", "test")

_NUMBER = re.compile(r"[.0-9]+")
_NEGATIVE = re.compile(r"(^|[\s,/])-\s*[.0-9]")

Bounds = tuple[float, float]
"""Shares [start, stop) of a corpus, between 0 and 1."""

WHOLE: Bounds = (0.0, 1.0)


def parse_split(split: str) -> tuple[float, float, float]:
    """The normalised shares of a split string such as "969, 30, 1" or "0.9/0.1".

    Missing shares are 0.

    Raises:
        DataError: no number, more than three, a negative one, or none above 0.
    """
    problem = None
    try:
        shares = [float(word) for word in _NUMBER.findall(split)]
    except ValueError:
        shares = []
        problem = "not all parts are numbers"
    if _NEGATIVE.search(split):
        problem = "a share is negative"
    elif len(shares) > len(SPLIT_NAMES):
        problem = f"{len(shares)} shares"
    elif problem is None and sum(shares) <= 0:
        problem = "no share is above 0"
    if problem:
        raise DataError(
            f"split {split!r} cannot be used ({problem}); give up to three shares for training, "
            "validation and test, for example 90,8,2"
        )
    padded = np.array(shares + [0.0] * (len(SPLIT_NAMES) - len(shares)), np.float64)
    train, valid, test = (padded / padded.sum()).tolist()
    return train, valid, test


def split_bounds(split: str) -> tuple[Bounds | None, Bounds | None, Bounds | None]:
    """Where each split starts and stops; None for a split without a share."""
    train, valid, test = parse_split(split)
    ends = (0.0, train, train + valid, train + valid + test)
    first, second, third = (
        (start, stop) if stop > start else None for start, stop in zip(ends, ends[1:], strict=False)
    )
    return first, second, third


def split_range(bounds: Bounds, num_sequences: int) -> range:
    """The sequence numbers of a split; both ends round half to even, so splits never overlap."""
    start, stop = (int(round(bound * float(num_sequences))) for bound in bounds)
    return range(start, min(stop, num_sequences))
