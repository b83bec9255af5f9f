"""Tensors that the checkpoint benchmarks save, and the ranks that have a part of them each."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.checkpoint import Rectangle, ShardedTensor

ROWS, COLUMNS = 1024, 1024

State = dict[str, Tensor]


def join_world(rank: int, args: argparse.Namespace, folder: Path) -> State:
    """Join `args.ranks` gloo ranks of one thread each; this one's part of `args.megabytes`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    count = max(1, round(args.megabytes * 1e6 / args.ranks / (4 * ROWS * COLUMNS)))
    return {f"weight{i}": torch.randn(ROWS, COLUMNS) for i in range(count)}


def megabytes_of(tensors: State) -> float:
    """Of all ranks' parts together."""
    return dist.get_world_size() * sum(tensor.nbytes for tensor in tensors.values()) / 1e6


def sharded(tensors: State) -> dict[str, ShardedTensor]:
    """This rank's slice of each tensor as part of a global tensor, cut along the rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        name: ShardedTensor(
            name, (world * ROWS, COLUMNS), data.dtype, [Rectangle((rank * ROWS, 0), data)]
        )
        for name, data in tensors.items()
    }
