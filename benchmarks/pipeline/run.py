"""Measured step times of pipeline schedules beside predicted ones and beside torch's.

python benchmarks/pipeline/run.py --schedules 1f1b,zb-h1
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from ranks import run_ranks  # noqa: E402

RANKS = 2


def run(options: argparse.Namespace) -> dict:
    """All rows in one pair of processes, step by step in turn: drift hits them alike."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        environment = {
            "OMP_NUM_THREADS": "1",
            "BENCHMARK_ROWS": options.schedules,
            "BENCHMARK_SIZE": options.size,
            "BENCHMARK_STEPS": str(options.steps),
            "BENCHMARK_PAUSE": str(options.pause),
            "BENCHMARK_RECORD": str(record),
        }
        run_ranks([str(HERE / "worker.py")], RANKS, environment, options.timeout)
        return json.loads(record.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved-1f1b,zb-h1,zb-v")
    parser.add_argument("--size", default="small")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a row")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before every step")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that all may take")
    options = parser.parse_args()
    results = run(options)
    print("row | ms a step, median (best) | tokens/s | F B W message, ms | predicted ms | ratio")
    for row in results["rows"]:
        middle = median(row["seconds"])
        line = f"{row['row']:<24}{1000 * middle:8.1f} ({1000 * min(row['seconds']):.1f})"
        line += f" |{results['tokens'] / middle:8,.0f}"
        if "predicted" in row:
            line += " | " + " ".join(f"{1000 * cost:.1f}" for cost in row["costs"])
            line += f" |{1000 * row['predicted']:8.1f} | {middle / row['predicted']:.3f}"
        print(f"{line}   (gradient norm {row['norm']:.6f})")


if __name__ == "__main__":
    main()
