"""A process group with its ranks and this process's place in it, kept together."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from mcore.errors import TopologyError


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate, in order, and where this process stands among them.

    Attributes:
        name: what the group is for (`tp`, `dp-cp`, ...), used in messages.
        ranks: global ranks in group order.
        index: this process's position in `ranks`.
        handle: the torch process group. It is None only where torch.distributed is not in use at
            all: torch reads None as the whole world, so a live group always has a handle.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        assert 0 <= self.index < len(self.ranks)
        if self.handle is None and len(self.ranks) > 1:
            raise TopologyError(f"group {self.name} of {len(self.ranks)} ranks needs a handle")

    @classmethod
    def single(cls, name: str, rank: int = 0) -> Group:
        """A group of one process that never communicates."""
        return cls(name, (rank,), 0, None)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This process's position in the group."""
        return self.index

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return self.ranks[self.index]

    @property
    def next_rank(self) -> int:
        """Global rank of the next member, wrapping around."""
        return self.ranks[(self.index + 1) % self.size]

    @property
    def prev_rank(self) -> int:
        """Global rank of the previous member, wrapping around."""
        return self.ranks[(self.index - 1) % self.size]

    @property
    def src_rank(self) -> int:
        """Global rank of the first member."""
        return self.ranks[0]

    @property
    def is_first(self) -> bool:
        """Whether this process is the first member."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this process is the last member."""
        return self.index == self.size - 1


def as_group(group: Group | dist.ProcessGroup, name: str = "user") -> Group:
    """Wrap a raw process group at a public edge; a `Group` is returned as it is.

    Raises:
        TopologyError: this process is not a member.
    """
    if isinstance(group, Group):
        return group
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank()
    if rank not in ranks:
        raise TopologyError(f"rank {rank} is not in group {name} with ranks {list(ranks)}")
    return Group(name, ranks, ranks.index(rank), group)
