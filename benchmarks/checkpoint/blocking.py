"""How long a save keeps training waiting: in the foreground, in the background, a bare copy.

    python benchmarks/checkpoint/blocking.py --megabytes 600 --ranks 2

All three alternate within each repetition. A training step is imitated by matrix products; how much
slower they are while the thread writes is given too. Of several ranks each has an equal part, and
the times are those of the first.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from weights import join_world, megabytes_of, sharded

from mcore.checkpoint import AsyncSaver, save


def seconds(action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def step(matrix: torch.Tensor) -> None:
    for _ in range(4):
        matrix = torch.tanh(matrix @ matrix)


def steps_while_writing(saver: AsyncSaver, matrix: torch.Tensor) -> list[float]:
    taken = []
    while saver.poll():
        taken.append(seconds(lambda: step(matrix)))
    return taken


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    data = join_world(rank, args, folder)
    copies = {name: torch.empty_like(tensor) for name, tensor in data.items()}
    tensors = sharded(data)
    matrix = torch.randn(512, 512)
    saver = AsyncSaver()
    times: dict[str, list[float]] = {name: [] for name in ("copy", "async", "sync", "idle", "busy")}
    for number in range(args.repeats + 1):
        dist.barrier()
        copy = seconds(lambda: [copies[name].copy_(t) for name, t in data.items()])
        dist.barrier()
        blocked = seconds(lambda n=number: saver.save(folder / "async", n, tensors, {}))
        busy = steps_while_writing(saver, matrix)
        sync = seconds(lambda n=number: save(folder / "sync", n, tensors, {}))
        idle = [seconds(lambda: step(matrix)) for _ in range(20)]
        dist.barrier()
        for root in ("async", "sync") if rank == 0 else ():
            shutil.rmtree(folder / root)
        if number:  # the first warms up: buffers are taken, pages are touched
            for name, value in zip(times, (copy, blocked, sync), strict=False):
                times[name].append(value)
            times["idle"] += idle
            times["busy"] += busy
    saver.close()
    if rank == 0:
        report(megabytes_of(data), args, times)
    dist.destroy_process_group()


def report(megabytes: float, args: argparse.Namespace, times: dict[str, list[float]]) -> None:
    middle = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    beyond = 100 * (middle["async"] - middle["copy"]) / middle["sync"]
    print(f"{megabytes:.0f} MB, {args.ranks} ranks, median of {args.repeats}, milliseconds")
    print("copy {copy:.0f}, async save {async:.0f}, sync save {sync:.0f}".format_map(middle))
    print(f"blocked beyond the copy: {beyond:.1f}% of a sync save")
    print("step {idle:.1f}, while the thread writes {busy:.1f}".format_map(middle))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time that saving blocks training.")
    parser.add_argument("--megabytes", type=float, default=600.0)
    parser.add_argument("--ranks", type=int, default=1)
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
