"""Save and load bandwidth of a checkpoint against raw files and what torch brings.

    python benchmarks/checkpoint/bandwidth.py --ranks 2 --megabytes 300

Every way writes the same bytes, a slice per rank, and flushes them to the disk; reads come from the
system's cache. All ways alternate within each repetition, because disks and neighbours drift.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor

from mcore.checkpoint import Rectangle, ShardedTensor, load, save

ROWS, COLUMNS = 1024, 1024
State = dict[str, Tensor]
Action = Callable[[Path, State], Any]


def sharded(tensors: State) -> dict[str, ShardedTensor]:
    """This rank's slice of each tensor as part of a global tensor, cut along the rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        name: ShardedTensor(
            name, (world * ROWS, COLUMNS), data.dtype, [Rectangle((rank * ROWS, 0), data)]
        )
        for name, data in tensors.items()
    }


def own_names(tensors: State) -> State:
    return {f"{name}.rank{dist.get_rank()}": data for name, data in tensors.items()}


def flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def raw_write(folder: Path, tensors: State) -> None:
    with open(folder / f"raw{dist.get_rank()}", "wb") as file:
        for data in tensors.values():
            file.write(data.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def raw_read(folder: Path, tensors: State) -> None:
    with open(folder / f"raw{dist.get_rank()}", "rb") as file:
        for data in tensors.values():
            file.readinto(data.numpy().data)


def torch_save(folder: Path, tensors: State) -> None:
    path = folder / f"torch{dist.get_rank()}.pt"
    torch.save(tensors, path)
    flush(path)


def torch_load(folder: Path, tensors: State) -> None:
    for name, data in torch.load(folder / f"torch{dist.get_rank()}.pt").items():
        tensors[name].copy_(data)


WAYS: dict[str, tuple[Action, Action]] = {
    "raw file": (raw_write, raw_read),
    "mcore": (
        lambda folder, tensors: save(folder / "mcore", 1, sharded(tensors), {}),
        lambda folder, tensors: load(folder / "mcore", sharded(tensors)),
    ),
    "torch.distributed.checkpoint": (
        lambda folder, tensors: dcp.save(own_names(tensors), checkpoint_id=folder / "dcp"),
        lambda folder, tensors: dcp.load(own_names(tensors), checkpoint_id=folder / "dcp"),
    ),
    "torch.save": (torch_save, torch_load),
}


def timed(action: Action, folder: Path, tensors: State) -> float:
    dist.barrier()
    start = time.perf_counter()
    action(folder, tensors)
    dist.barrier()
    return time.perf_counter() - start


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), args.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    count = max(1, round(args.megabytes * 1e6 / args.ranks / (4 * ROWS * COLUMNS)))
    tensors = {f"weight{i}": torch.randn(ROWS, COLUMNS) for i in range(count)}
    target = {name: torch.ones_like(data) for name, data in tensors.items()}
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in WAYS}
    for _ in range(args.repeats + 1):
        for name, (write, read) in WAYS.items():
            seconds[name][0].append(timed(write, folder, tensors))
            seconds[name][1].append(timed(read, folder, target))
            assert all(torch.equal(target[key], tensors[key]) for key in tensors)
            for data in target.values():
                data.fill_(1)
            if rank == 0 and name == "torch.distributed.checkpoint":
                shutil.rmtree(folder / "dcp")
            dist.barrier()
    if rank == 0:
        megabytes = count * args.ranks * 4 * ROWS * COLUMNS / 1e6
        print(f"{megabytes:.0f} MB, {args.ranks} ranks; MB/s, median (best)")
        for name, times in seconds.items():
            rates = [[megabytes / second for second in part[1:]] for part in times]  # 1 = warm-up
            text = [f"{statistics.median(rate):6.0f} ({max(rate):.0f})" for rate in rates]
            print(f"{name:<30} save {text[0]:<16} load {text[1]}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoint bandwidth.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write; the system's temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        mp.spawn(measure, (args, folder), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
