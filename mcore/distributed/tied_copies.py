"""Copies of one parameter on several stages of a pipeline start from one set of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mcore.distributed.data_parallel import DataParallelModule
from mcore.errors import TopologyError
from mcore.topology.collectives import broadcast_
from mcore.topology.context import ParallelContext


def no_copy_here(key: str, rank: int) -> TopologyError:
    """What to raise where a rank of the embedding group lacks a tied parameter."""
    return TopologyError(
        f"parameter {key} is tied to a copy on another stage, but this stage, rank {rank}, has no "
        "parameter of that name"
    )


def share_tied_parameters(model: Sequence[DataParallelModule], context: ParallelContext) -> None:
    """Give every copy of a tied parameter the first stage's numbers.

    Equal gradients keep equal copies equal, and make nothing of copies that were drawn apart, as by
    a program that seeds each stage differently.

    Args:
        model: all of this rank's model chunks.
        context: groups.

    Comm: one broadcast of each tied parameter (with sharding, of this rank's shard) over the
        embedding group, once; every rank of it has to call this.

    Raises:
        TopologyError: this rank is in the embedding group and has no such parameter.
    """
    copies: dict[str, list[Tensor]] = {
        key: [] for key in sorted({key for chunk in model for key in chunk.replicas.tied_keys})
    }
    if not copies:
        return
    for chunk in model:
        for part in chunk.held_parts():
            if part.name in copies:
                # The original, which is on the first stage, before copies on the same rank.
                place = 0 if part.sharding.tied_key is None else len(copies[part.name])
                copies[part.name].insert(place, part.data)
    for key, here in copies.items():
        if not here:
            raise no_copy_here(key, context.rank)
        source, *others = here
        if context.embd is not None and source.numel():
            first_stage = context.pp.ranks[context.placement.first_rank]
            broadcast_(source, context.embd, context.embd.ranks.index(first_stage))
        for copy in others:
            copy.copy_(source)
