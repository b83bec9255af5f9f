"""State that belongs to one rank, such as its random generators.

It has no meaning at another layout, so it is restored only where layout and rank are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_KEY = re.compile(r".+\.rank_[0-9]{5,}")


@dataclass(frozen=True, slots=True)
class RankLocal:
    """This rank's own state, or (without tensors) who asks for it.

    Attributes:
        rank: global rank.
        layout: sizes and order of the parallel layout and whatever else the state depends on; JSON.
        tensors: by name; `rng` of rank 3 is stored under the key `rng.rank_00003`.
    """

    rank: int
    layout: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Key of a tensor of this rank."""
        return f"{name}.rank_{self.rank:05d}"

    def name(self, key: str) -> str | None:
        """Name of a tensor if the key is one of this rank's."""
        name, _, suffix = key.rpartition(".")
        return name if suffix == f"rank_{self.rank:05d}" else None


def is_rank_local(key: str) -> bool:
    """Whether a key belongs to the state of one rank."""
    return _KEY.fullmatch(key) is not None
