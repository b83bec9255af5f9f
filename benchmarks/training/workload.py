"""What every row of the training benchmark computes, and how its steps are timed."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Workload:
    """Shape of the model and of a step; every row has the same."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    micro_batch: int
    global_batch: int

    @property
    def tokens(self) -> int:
        return self.global_batch * self.seq


WORKLOADS = {
    "tiny": Workload(2, 64, 4, 64, 512, 2, 8),
    "small": Workload(4, 256, 8, 256, 8192, 4, 16),
    "wide": Workload(4, 512, 8, 512, 32000, 2, 8),
}
LEARNING_RATE, BETAS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 0.1


def batches(work: Workload, count: int = 4) -> list[torch.Tensor]:
    """Global batches of random tokens, [global batch, s + 1], the same for every row."""
    generator = torch.Generator().manual_seed(7)
    shape = (work.global_batch, work.seq + 1)
    return [torch.randint(0, work.vocab, shape, generator=generator) for _ in range(count)]


def join_world() -> tuple[int, int]:
    """(rank, world size), over loopback where there are several processes."""
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=180))
        return dist.get_rank(), world
    return 0, 1


def time_steps(step: Callable[[int], float | None], warmup: int, steps: int) -> None:
    """Time steps between barriers and write this rank's figures where the launcher reads them.

    CPU seconds are beside wall seconds: on a shared machine they move far less.
    """
    wall, cpu, losses = [], [], []
    for i in range(warmup + steps):
        if dist.is_initialized():
            dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        losses.append(step(i))
        if dist.is_initialized():
            dist.barrier()
        if i >= warmup:
            wall.append(time.perf_counter() - start)
            cpu.append(time.process_time() - start_cpu)
    record = {
        "wall": wall,
        "cpu": statistics.median(cpu),
        "loss": losses[warmup - 1],
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # MiB on Linux
    }
    path = os.path.join(os.environ["BENCHMARK_RECORDS"], f"{os.environ['RANK']}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(record, file)
