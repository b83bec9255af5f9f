"""Data parallelism and ZeRO beside torch's and DeepSpeed's, each row in turn, several rounds over.

python benchmarks/data_parallel/run.py --size small --rounds 1 [--deepspeed-python VENV/bin/python]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "training"))

from run import run_row  # noqa: E402
from workload import WORKLOADS  # noqa: E402

#: (row, script seen from the training benchmark's folder, arguments)
ROWS = [
    ("mcore", "row_mcore.py", ["1", "1"]),
    ("mcore, overlapped", "row_mcore.py", ["1", "1", "overlap"]),
    ("torch DDP", "row_torch.py", ["ddp"]),
    ("mcore ZeRO-1", "row_mcore.py", ["1", "1", "zero1"]),
    ("mcore ZeRO-1, overlapped", "row_mcore.py", ["1", "1", "zero1", "overlap"]),
    ("torch ZeroRedundancyOptimizer", "row_torch.py", ["zero1"]),
    ("DeepSpeed stage 1", "../data_parallel/row_deepspeed.py", ["1"]),
    ("mcore ZeRO-2", "row_mcore.py", ["1", "1", "zero2"]),
    ("DeepSpeed stage 2", "../data_parallel/row_deepspeed.py", ["2"]),
    ("mcore ZeRO-3", "row_mcore.py", ["1", "1", "zero3"]),
    ("torch fully_shard", "row_torch.py", ["fsdp2"]),
    ("DeepSpeed stage 3", "../data_parallel/row_deepspeed.py", ["3"]),
]
PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", choices=sorted(WORKLOADS), default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a row and round")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a row may take")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--deepspeed-python", help="interpreter of an environment with DeepSpeed")
    options = parser.parse_args()
    rows = [
        row
        for row in ROWS
        if options.only in row[0] and (options.deepspeed_python or "DeepSpeed" not in row[0])
    ]
    found: dict[str, list[dict]] = {name: [] for name, _, _ in rows}
    failed: list[str] = []
    for _ in range(options.rounds):
        for name, script, arguments in rows:
            python = options.deepspeed_python if "DeepSpeed" in name else sys.executable
            try:
                found[name].append(run_row(script, arguments, PROCESSES, options, python))
            except (SystemExit, subprocess.TimeoutExpired) as error:
                failed.append(f"{name}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
            else:
                print(name, found[name][-1], file=sys.stderr, flush=True)
    tokens = WORKLOADS[options.size].tokens
    print(f"{options.size}: tokens/s median (best step) | CPU s a step | peak MiB a rank | loss")
    for name, results in found.items():
        if not results:
            continue
        wall = [seconds for result in results for seconds in result["wall"]]
        cpu = statistics.median(result["cpu"] for result in results)
        peak = max(result["peak"] for result in results)
        print(
            f"  {name:<30}{tokens / statistics.median(wall):9,.0f} "
            f"({tokens / min(wall):,.0f}) | {cpu:.2f} | {peak:,.0f} | {results[-1]['loss']:.4f}",
            flush=True,
        )
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
