"""Data paths of the command line, and the order in which a blend draws from its corpora."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcore.config.data import DataConfig
from mcore.data.splits import SPLIT_NAMES
from mcore.errors import DataError

_LANE = 1024  # consecutive draws that one lane of `blend_order` makes


@dataclasses.dataclass(frozen=True, slots=True)
class Blend:
    """Corpora and their normalised weights; None = in proportion to their lengths, one pass."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(words: Sequence[str]) -> Blend:
    """The corpora of a data path: `P`, `P1 P2 ...` or `W1 P1 W2 P2 ...`.

    An even number of words of which every other one is a number is weighted; an odd number never
    is.

    Raises:
        DataError: nothing named, weights for some corpora only, or a weight that is not above 0.
    """
    if not words:
        raise DataError("a data path is empty; name the prefix of a .bin and .idx pair")
    if len(words) % 2:
        return Blend(tuple(words), None)
    raw_weights = [_number(word) for word in words[::2]]
    weights = [weight for weight in raw_weights if weight is not None]
    if not weights:
        return Blend(tuple(words), None)
    if len(weights) < len(raw_weights):
        raise DataError(
            f"data path {' '.join(words)!r} has weights for some corpora only; give each corpus "
            "its weight in front, or none"
        )
    return Blend(tuple(words[1::2]), normalise(weights))


def dangling_weight(words: Sequence[str]) -> str | None:
    """What is wrong with a data path that ends in a weight without a corpus, or None.

    Megatron takes every word of an odd number of words for a prefix. Where all that should be
    weights are numbers, and none of them names a file, a corpus was forgotten.
    """
    if len(words) % 2 == 0 or len(words) == 1:
        return None
    if any(_number(word) is None or Path(f"{word}.idx").exists() for word in words[::2]):
        return None
    return (
        f"{' '.join(words)!r} ends in the weight {words[-1]} without a corpus; write "
        "WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes alone"
    )


def normalise(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights that sum to 1.

    Raises:
        DataError: a weight that is not a finite number above 0.
    """
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise DataError(
            f"blend weights {', '.join(map(str, weights))} must all be above 0 and finite; leave a "
            "corpus out instead of giving it 0"
        )
    array = np.array(weights, np.float64)
    return tuple((array / array.sum()).tolist())


def read_blends(config: DataConfig) -> tuple[Blend | None, Blend | None, Blend | None]:
    """The blend of every split; the same object three times when one corpus is cut by `--split`.

    Raises:
        DataError: an unreadable file, or a data path that cannot be used.
    """
    if not config.has_separate_splits:
        words = config.data_path
        if config.data_args_path is not None:
            words = tuple(_read_text(config.data_args_path).split())
        if words is None:
            raise DataError("no data: give --data-path, or a path for each split")
        blend = _complete_blend(words)
        return blend, blend, blend
    paths: dict[str, Sequence[str] | None]
    if config.per_split_data_args_path is not None:
        paths = _read_per_split(config.per_split_data_args_path)
    else:
        given = (config.train_data_path, config.valid_data_path, config.test_data_path)
        paths = dict(zip(SPLIT_NAMES, given, strict=True))
    train, valid, test = (_separate_blend(paths[name]) for name in SPLIT_NAMES)
    return train, valid, test


def validation_sets_problem(blend: Blend, chosen_names: Sequence[str] | None) -> str | None:
    """What keeps the corpora of the validation split from being measured one by one, or None.

    Args:
        blend: of the validation split.
        chosen_names: `--validation-set-names`.
    """
    if blend.weights is not None:
        return "--multiple-validation-sets measures each corpus on its own; leave the weights out"
    names = chosen_names or ()
    if names and not len(names) == len(set(names)) == len(blend.prefixes):
        return (
            f"--validation-set-names gives {', '.join(names)} to {len(blend.prefixes)} validation "
            "sets; give each a name of its own"
        )
    return None


def blend_order(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Which corpus each sample of a blend comes from, and which of that corpus's samples it is.

    Draw i takes the corpus that lags its share most: the largest `weight * max(i, 1) - drawn`, the
    first one on a tie. The rule looks only at the counts so far, and it forgets small deviations at
    once. So the draws are made in many lanes side by side, each from guessed counts; a lane whose
    guess was not what the lane before it ended with is made again, until all agree. The result is
    that of drawing one by one.

    Args:
        weights: shares of the corpora, which sum to 1.
        size: number of draws.
        limits: samples of each corpus; one that is used up is drawn no more. None = no limits.

    Returns:
        The corpus (int16) and the sample number in it (int64) of every draw, each [size].

    Source: Megatron-LM's blended data set.
    """
    if limits is not None and size > sum(limits):
        raise DataError(f"{size} samples wanted from corpora that hold {sum(limits)}")
    if len(weights) == 1:
        return np.broadcast_to(np.int16(0), size), np.arange(size)
    lanes = -(-size // _LANE)
    starts = _guess_counts(weights, np.arange(lanes, dtype=np.int64) * _LANE)
    ends = np.empty_like(starts)
    corpora = np.empty((lanes, _LANE), np.int16)
    samples = np.empty((lanes, _LANE), np.int64)
    todo = np.arange(lanes)
    while len(todo):
        ends[todo], corpora[todo], samples[todo] = _draw_lanes(
            weights, todo * _LANE, starts[todo], limits
        )
        wrong = np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1)) + 1
        starts[wrong] = ends[wrong - 1]
        todo = wrong
    return corpora.reshape(-1)[:size], samples.reshape(-1)[:size]


def _draw_lanes(
    weights: Sequence[float], first: np.ndarray, counts: np.ndarray, limits: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`_LANE` draws in every lane.

    Args:
        weights: shares, [corpora].
        first: number of each lane's first draw, [lanes].
        counts: samples drawn before it, [lanes, corpora]; not modified.
        limits: samples of each corpus.

    Returns:
        Counts afterwards, [lanes, corpora]; corpora and sample numbers, [lanes, _LANE].
    """
    counts = counts.copy()
    share = np.array(weights, np.float64)
    limit = None if limits is None else np.array(limits, np.int64)
    rows = np.arange(len(first))
    corpora = np.empty((len(first), _LANE), np.int16)
    samples = np.empty((len(first), _LANE), np.int64)
    for step in range(_LANE):
        draw = np.maximum(first + step, 1).astype(np.float64)
        lag = draw[:, None] * share - counts
        if limit is not None:
            lag[counts >= limit] = -np.inf
        picked = lag.argmax(axis=1)
        corpora[:, step] = picked
        samples[:, step] = counts[rows, picked]
        counts[rows, picked] += 1
    return counts, corpora, samples


def _guess_counts(weights: Sequence[float], draws: np.ndarray) -> np.ndarray:
    """Counts near `weight * draws` that sum to `draws`, int64 [lanes, corpora]; zeros at 0."""
    exact = draws[:, None] * np.array(weights, np.float64)
    counts = np.floor(exact).astype(np.int64)
    missing = draws - counts.sum(axis=1)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    return counts + (rank < missing[:, None])


def _separate_blend(words: Sequence[str] | None) -> Blend | None:
    if words is None:
        return None
    blend = _complete_blend(words)
    # Megatron ignores the weight of a split's only corpus here, which makes it an unweighted one.
    return Blend(blend.prefixes, None) if len(blend.prefixes) == 1 else blend


def _complete_blend(words: Sequence[str]) -> Blend:
    problem = dangling_weight(words)
    if problem is not None:
        raise DataError(f"data path {problem}")
    return parse_blend(words)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}, which should list the data paths, cannot be read: {error}"
        ) from error


def _read_per_split(path: str) -> dict[str, Sequence[str] | None]:
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or not set(content) <= set(SPLIT_NAMES):
        raise DataError(f"{path} must be a JSON object with the keys {', '.join(SPLIT_NAMES)}")
    for name, words in content.items():
        if words is not None and not isinstance(words, list):
            raise DataError(f"{path}: {name} must be a list of --data-path words, got {words!r}")
    return {
        name: [str(word) for word in content[name]] if content.get(name) is not None else None
        for name in SPLIT_NAMES
    }
