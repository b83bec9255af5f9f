"""Save and load bandwidth of a checkpoint against raw files and what torch brings.

    python benchmarks/checkpoint/bandwidth.py --ranks 2 --megabytes 300

Every way writes the same bytes, a slice per rank, into an empty folder and flushes them to the
disk; what they wrote before is deleted outside of what is timed. Each reads twice: from the
system's cache, and from the disk after the cache was asked to forget the files. All ways alternate
within each repetition, because disks and neighbours drift.
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
from weights import State, join_world, megabytes_of, sharded

from mcore.checkpoint import load, save

RAW = "raw file"
Seconds = list[float]
Action = Callable[[Path, State], Any]


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
    RAW: (raw_write, raw_read),
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


def forget_cached(folder: Path) -> None:
    """Have the next reading come from the disk."""
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def one_round(way: tuple[Action, Action], folder: Path, tensors: State, target: State) -> Seconds:
    """Seconds of a save, a load from the cache and one from the disk."""
    if dist.get_rank() == 0:
        folder.mkdir()
    write, read = way
    seconds = [timed(write, folder, tensors)]
    for is_cold in (False, True):
        for data in target.values():
            data.fill_(1)
        if is_cold:
            forget_cached(folder)
        seconds.append(timed(read, folder, target))
        assert all(torch.equal(target[key], tensors[key]) for key in tensors)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return seconds


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    tensors = join_world(rank, args, folder)
    target = {name: torch.ones_like(data) for name, data in tensors.items()}
    ways = {name: way for name, way in WAYS.items() if not args.only or name in args.only}
    rounds: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(args.repeats + 1):
        for name, way in ways.items():
            rounds[name].append(one_round(way, folder / "files", tensors, target))
    if rank == 0:
        report(megabytes_of(tensors), args.ranks, rounds)
    dist.destroy_process_group()


def report(megabytes: float, ranks: int, rounds: dict[str, list[Seconds]]) -> None:
    """Megabytes per second, and what that is of a raw file's; the first round warms up."""
    print(f"{megabytes:.0f} MB, {ranks} ranks; MB/s, median (best)")
    rates = {
        name: [[megabytes / second for second in column] for column in zip(*times[1:], strict=True)]
        for name, times in rounds.items()
    }
    for name, columns in rates.items():
        text = [f"{statistics.median(rate):6.0f} ({max(rate):.0f})" for rate in columns]
        print(f"{name:<30} save {text[0]:<14} load {text[1]:<15} cold {text[2]}")
    if RAW in rates:
        save_rate, load_rate, cold_rate = (statistics.median(column) for column in rates[RAW])
        for name, columns in rates.items():
            save, load, cold = (statistics.median(column) for column in columns)
            print(
                f"{name:<30} of raw: save {save / save_rate:.2f}, load {load / load_rate:.2f}, "
                f"cold {cold / cold_rate:.2f}; load of raw write {load / save_rate:.2f}, cold of "
                f"raw write {cold / save_rate:.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoint bandwidth.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=300.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", action="append", help="a way; all of them when absent")
    parser.add_argument("--dir", type=Path, help="where to write; the system's temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        mp.spawn(measure, (args, folder), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
