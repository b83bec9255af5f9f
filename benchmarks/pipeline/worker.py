"""One rank of the benchmark; see run.py, which starts it."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from statistics import median
from typing import Any

import rows_mcore
import rows_torch
import torch
import torch.distributed as dist
from stages import WORK, Work

WARMUP = 1


def gradient_norm(row: Any) -> float:
    """Of all ranks' parameters: the rows of a schedule have to agree."""
    total = torch.stack([param.grad.double().square().sum() for param in row.params]).sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def message_seconds(work: Work, rank: int, times: int = 20) -> float:
    """One way between two ranks, half of a round trip."""
    tensor, other = torch.zeros(work.shape), 1 - rank
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        for sends in (rank == 0, rank == 1):
            (dist.send if sends else dist.recv)(tensor, other)
        seconds.append((time.perf_counter() - start) / 2)
    shared = torch.tensor(median(seconds))
    dist.broadcast(shared, 0)
    return float(shared)


def build_rows(work: Work, rank: int, world: int) -> dict[str, Any]:
    """For each name a row of mcore; beside it torch's, unless the name says `+own`."""
    rows: dict[str, Any] = {}
    for name in os.environ["BENCHMARK_ROWS"].split(","):
        schedule, plus, _ = name.partition("+own")
        rows[f"mcore {name}"] = rows_mcore.Row(schedule, work, rank, world, own_layers=bool(plus))
        if not plus:
            rows[f"torch {name}"] = rows_torch.Row(name, work, rank, world)
    return rows


def time_rows(rows: dict[str, Any], steps: int, pause: float) -> dict[str, list[float]]:
    """Seconds of each step between barriers; the rows take turns, so that drift hits all alike."""
    seconds: dict[str, list[float]] = {label: [] for label in rows}
    for step in range(WARMUP + steps):
        for label, row in rows.items():
            time.sleep(pause)
            if step == WARMUP and isinstance(row, rows_mcore.Row):
                row.start_measuring()
            dist.barrier()
            start = time.perf_counter()
            row.step()
            dist.barrier()
            if step >= WARMUP:
                seconds[label].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    work = WORK[os.environ["BENCHMARK_SIZE"]]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = build_rows(work, rank, world)
    steps, pause = int(os.environ["BENCHMARK_STEPS"]), float(os.environ["BENCHMARK_PAUSE"])
    seconds = time_rows(rows, steps, pause)
    communication = message_seconds(work, rank)
    results = []
    for label, row in rows.items():
        result = {"row": label, "seconds": seconds[label], "norm": gradient_norm(row)}
        if isinstance(row, rows_mcore.Row):
            costs, predicted = row.predict(communication)
            result |= {
                "predicted": predicted,
                "costs": [costs.forward, costs.backward, costs.weight, costs.communication],
            }
        results.append(result)
    if rank == 0:
        with open(os.environ["BENCHMARK_RECORD"], "w", encoding="utf-8") as file:
            json.dump({"tokens": work.tokens, "rows": results}, file)
    dist.barrier()
    dist.destroy_process_group()


main()
