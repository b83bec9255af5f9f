"""Where a split comes from, for messages about one that is empty or too short."""

from __future__ import annotations

import dataclasses

from mcore.config.data import DEFAULT_SPLIT, DataConfig
from mcore.data.blend import read_blends
from mcore.data.splits import SPLIT_NAMES, split_bounds


@dataclasses.dataclass(frozen=True, slots=True)
class SplitSource:
    """Where a split comes from, in words for messages.

    Attributes:
        files: its corpora; those of all splits where it has none.
        lack: why it has no share in them; None = it has one.
    """

    files: str
    lack: str | None


def split_source(config: DataConfig, number: int) -> SplitSource:
    """Where split `number` (training, validation, test) comes from.

    Raises:
        DataError: data paths that cannot be used.
    """
    if not config.has_data:
        return SplitSource("the data sets of the program", "it gives none")
    blends, name = read_blends(config), SPLIT_NAMES[number]
    blend = blends[number]
    if blend is None:
        others = dict.fromkeys(prefix for each in blends if each for prefix in each.prefixes)
        return SplitSource(" ".join(others), f"there is no --{name}-data-path")
    files = " ".join(blend.prefixes)
    split = DEFAULT_SPLIT if config.split is None else config.split
    if not config.has_separate_splits and split_bounds(split)[number] is None:
        return SplitSource(files, f"--split {split} gives it no share")
    return SplitSource(files, None)
