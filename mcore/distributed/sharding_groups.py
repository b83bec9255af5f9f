"""Which data-parallel ranks share optimizer state and gradients, and which hold copies of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mcore.errors import ConfigError
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group
from mcore.topology.rank_layout import RankLayout


@dataclass(frozen=True, slots=True)
class ShardingGroups:
    """Data-parallel ranks by what they hold.

    Attributes:
        all: data- and context-parallel ranks: gradients are summed over them.
        shard: neighbours among them that share out one copy of the optimizer state.
        replica: the ranks that hold the same shard.
    """

    all: Group
    shard: Group
    replica: Group


def build_sharding_groups(
    context: ParallelContext, instances: int = 1, *, timeout: timedelta | None = None
) -> ShardingGroups:
    """Split the data-parallel ranks into `instances` runs, each with the whole optimizer state.

    Args:
        context: groups.
        instances: copies of the optimizer state.
        timeout: of the groups that are made; torch's default when None.

    Comm: with more than one instance it creates communicators; every rank of the world takes part.

    Raises:
        ConfigError: the ranks do not divide.
    """
    whole = context.dp_cp
    if whole.size % instances:
        raise ConfigError(
            f"num_distributed_optimizer_instances ({instances}) must divide the data-parallel size "
            f"({whole.size})"
        )
    if instances == 1:
        return ShardingGroups(whole, whole, Group.single("dp-replica", context.rank))
    shards, replicas = shards_and_replicas(context.layout, instances)
    return ShardingGroups(
        whole,
        _member("dp-shard", shards, context, timeout),
        _member("dp-replica", replicas, context, timeout),
    )


def shards_and_replicas(
    layout: RankLayout, instances: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Ranks of the groups that share out one copy, and of those that hold the same shard.

    Args:
        layout: of all ranks.
        instances: copies of the optimizer state; it divides the data-parallel ranks.
    """
    shards, replicas = [], []
    for ranks in layout.groups("dp-cp"):
        size = len(ranks) // instances
        runs = [tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)]
        shards += runs
        replicas += list(zip(*runs, strict=True))
    return shards, replicas


def _member(
    name: str, groups: list[tuple[int, ...]], context: ParallelContext, timeout: timedelta | None
) -> Group:
    """This rank's group of a kind; torch wants every rank to create all of them in one order."""
    mine: Group | None = None
    for ranks in groups:
        handle = dist.new_group(list(ranks), timeout=timeout)
        if context.rank in ranks:
            mine = Group(name, ranks, ranks.index(context.rank), handle)
    assert mine is not None
    return mine
