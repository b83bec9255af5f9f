"""Where the stages of a pipeline live: global stage <-> (rank, chunk).

The model is a chain of stages 0 .. n-1; each lives on a rank as one of its chunks. Everything that
depends on neighbours (messages, embedding and loss owner, label readers) asks the placement, so
that placements other than the usual one need no change elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mcore.errors import ConfigError


class Location(NamedTuple):
    """A model chunk of a pipeline rank."""

    rank: int
    chunk: int


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """A chain of stages laid out over ranks.

    Attributes:
        locations: the (rank, chunk) of global stage 0, 1, ...; ranks are 0 .. pp-1, and every rank
            has the same number of chunks 0 .. v-1.

    Raises:
        ConfigError: a rank or chunk is missing or named twice.
    """

    locations: tuple[Location, ...]
    _stages: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages = {location: stage for stage, location in enumerate(self.locations)}
        object.__setattr__(self, "_stages", stages)
        wanted = {(r, c) for r in range(self.num_ranks) for c in range(self.num_chunks)}
        if not self.locations or len(self.locations) != len(wanted) or set(stages) != wanted:
            raise ConfigError(
                f"a stage placement must name every chunk of every rank once, got {self.locations}"
            )

    @classmethod
    def usual(cls, pp: int, num_chunks: int = 1) -> StagePlacement:
        """Global stage = chunk * pp + rank: the chain goes round the ranks once a chunk."""
        return cls(tuple(Location(r, c) for c in range(num_chunks) for r in range(pp)))

    @classmethod
    def v(cls, pp: int) -> StagePlacement:
        """Two chunks a rank: the chain runs down the ranks and back, so rank 0 has both ends.

        Source: Qi et al. 2023 (arXiv:2401.10241) section 6, ZB-V.
        """
        down = [Location(rank, 0) for rank in range(pp)]
        return cls((*down, *(Location(rank, 1) for rank in reversed(range(pp)))))

    @property
    def first_rank(self) -> int:
        """The rank that reads tokens."""
        return self.locations[0].rank

    @property
    def last_rank(self) -> int:
        """The rank that computes the loss."""
        return self.locations[-1].rank

    @property
    def num_stages(self) -> int:
        """Length of the chain."""
        return len(self.locations)

    @property
    def num_ranks(self) -> int:
        """Pipeline size pp."""
        return 1 + max((rank for rank, _ in self.locations), default=-1)

    @property
    def num_chunks(self) -> int:
        """Chunks a rank v."""
        return 1 + max((chunk for _, chunk in self.locations), default=-1)

    def stage(self, rank: int, chunk: int = 0) -> int:
        """The global stage of a rank's chunk."""
        return self._stages[rank, chunk]

    def is_first_stage(self, rank: int, chunk: int = 0) -> bool:
        """Whether the chunk reads tokens (it holds the embedding)."""
        return self.stage(rank, chunk) == 0

    def is_last_stage(self, rank: int, chunk: int = 0) -> bool:
        """Whether the chunk computes the loss (it holds the output layer)."""
        return self.stage(rank, chunk) == self.num_stages - 1

    def next(self, rank: int, chunk: int = 0) -> Location | None:
        """Where the chunk's output goes; None after the last stage."""
        stage = self.stage(rank, chunk) + 1
        return self.locations[stage] if stage < self.num_stages else None

    def prev(self, rank: int, chunk: int = 0) -> Location | None:
        """Where the chunk's input comes from; None before the first stage."""
        stage = self.stage(rank, chunk) - 1
        return self.locations[stage] if stage >= 0 else None
