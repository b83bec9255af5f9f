"""Whether data-parallel replicas of the parameters are still bit for bit the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from mcore.distributed import DataParallelModule
from mcore.errors import NumericsError
from mcore.topology.collectives import all_gather_along_dim, all_gather_object
from mcore.topology.context import ParallelContext

#: Elements that are hashed at a time: what is made of them takes 8 bytes each.
_CHUNK = 4 * 2**20

#: Odd, so that no bit of an element is lost, and different for neighbours (2^64 / golden ratio).
_STEP = 0x9E3779B97F4A7C15 - 2**64

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_bits(x: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, an int64 scalar on its device: NaN and -0 count as bits.

    The sum of the elements' bits times a weight that goes by the position, modulo 2^64: one changed
    element always changes it, an exchange of two does too.
    """
    bits = x.detach().reshape(-1).view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), device=x.device)
        total += ((part + 1) * (places * _STEP | 1)).sum()
    return total


def check_replicas(
    chunks: Sequence[DataParallelModule], ctx: ParallelContext, iteration: int
) -> None:
    """Compare every parameter over the ranks that hold it whole, or the same shard of it.

    Args:
        chunks: this rank's model chunks.
        ctx: groups.
        iteration: for the message.

    Comm: one all-gather of 8 bytes a parameter over the replicas, and what was found over the
        tensor- and pipeline-parallel ranks; every rank has to call it. The host waits.

    Raises:
        NumericsError: replicas differ; it names the parameters and the ranks.
    """
    found = _differences(chunks)
    everywhere = [line for lines in all_gather_object(found, ctx.mp) for line in lines]
    shared = {line for lines in all_gather_object(everywhere, ctx.dp_cp) for line in lines}
    if shared:
        listed = "\n  ".join(sorted(shared))
        raise NumericsError(
            f"iteration {iteration}: parameters are not the same on all data-parallel ranks:\n  "
            f"{listed}\nnothing was saved since the last check. Go back to a checkpoint from "
            "before; a rank whose memory or network corrupts numbers should be taken out"
        )


def _differences(chunks: Sequence[DataParallelModule]) -> list[str]:
    """What differs among this rank's replicas, in words."""
    lines = []
    for chunk in chunks:
        groups = chunk.groups
        group = groups.replica if chunk.ddp_config.sharding_stage == 3 else groups.all
        parts = [part for part in chunk.held_parts() if part.data.numel()]
        if group.size == 1 or not parts:
            continue
        own = torch.stack([hash_bits(part.data) for part in parts])
        hashes = all_gather_along_dim(own, 0, group).view(group.size, -1).tolist()
        for number, part in enumerate(parts):
            values = [row[number] for row in hashes]
            if len(set(values)) > 1:
                lines.append(f"{part.name}: {_who_differs(values, group.ranks)}")
    return lines


def _who_differs(values: Sequence[int], ranks: Sequence[int]) -> str:
    """The ranks against the majority, where there is one."""
    (most, count), *_ = Counter(values).most_common()
    others = [str(rank) for rank, value in zip(ranks, values, strict=True) if value != most]
    if 2 * count > len(values):
        return f"rank {', '.join(others)} differs from the other {count}"
    return f"ranks {', '.join(map(str, ranks))} do not agree"
