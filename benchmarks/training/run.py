"""Put rows side by side: every row runs in turn, several rounds over, so that drift hits all alike.

python benchmarks/training/run.py --size small --groups single,dp2,tp2,pp2 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from ranks import ROOT, run_ranks  # noqa: E402
from workload import WORKLOADS  # noqa: E402

#: group -> (processes, [(row, script, arguments)])
GROUPS = {
    "single": (
        1,
        [
            ("mcore", "row_mcore.py", ["1", "1"]),
            ("plain PyTorch", "row_torch.py", ["plain"]),
            ("Hugging Face GPT-2", "row_torch.py", ["hf"]),
        ],
    ),
    "dp2": (
        2,
        [("mcore", "row_mcore.py", ["1", "1"]), ("torch DDP", "row_torch.py", ["ddp"])],
    ),
    "tp2": (
        2,
        [
            ("mcore", "row_mcore.py", ["2", "1"]),
            ("mcore, sequence parallel", "row_mcore.py", ["2", "1", "sp"]),
            ("torch DTensor", "row_torch.py", ["tp"]),
        ],
    ),
    "pp2": (
        2,
        [
            ("mcore 1F1B", "row_mcore.py", ["1", "2"]),
            ("torch pipelining 1F1B", "row_torch.py", ["pp_1f1b"]),
        ],
    ),
}


def run_row(
    script: str,
    arguments: list[str],
    processes: int,
    options: argparse.Namespace,
    python: str = sys.executable,
) -> dict:
    """One row once: wall seconds of each step of the slowest rank, CPU seconds, peak of memory."""
    threads = max(1, (os.cpu_count() or 2) // processes)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "BENCHMARK_RECORDS": folder,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        }
        command = [str(HERE / script), options.size, str(options.steps), *arguments]
        run_ranks(command, processes, environment, options.timeout, python)
        records = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(processes)]
    losses = [record["loss"] for record in records if record["loss"] is not None]
    return {
        "wall": [max(step) for step in zip(*(r["wall"] for r in records), strict=True)],
        "cpu": sum(record["cpu"] for record in records),
        "loss": losses[-1],
        "peak": max(record["peak"] for record in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="small")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a row and round")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a row may take")
    options = parser.parse_args()
    tokens = WORKLOADS[options.size].tokens
    for group in options.groups.split(","):
        processes, rows = GROUPS[group]
        results: dict[str, list[dict]] = {name: [] for name, _, _ in rows}
        for _ in range(options.rounds):
            for name, script, arguments in rows:
                results[name].append(run_row(script, arguments, processes, options))
        print(f"\n{group}, {options.size}: tokens/s median (best step) | CPU seconds a step | loss")
        for name, found in results.items():
            wall = [seconds for result in found for seconds in result["wall"]]
            cpu = statistics.median(result["cpu"] for result in found)
            print(
                f"  {name:<26}{tokens / statistics.median(wall):9,.0f} "
                f"({tokens / min(wall):,.0f}) | {cpu:.3f} | {found[-1]['loss']:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
