"""Measured step times of pipeline schedules beside predicted ones and beside torch's.

python benchmarks/pipeline/run.py --schedules 1f1b,1f1b+own,zb-h1

`1f1b+own` is 1f1b over mcore's own linear layers, as zb-h1 and zb-v have them: beside it the
schedule is all that differs. zb-h1 and zb-v are judged against it, interleaved-1f1b against 1f1b:
none may be slower where the costs that were measured say so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from ranks import run_ranks  # noqa: E402

RANKS = 2
#: Measured over predicted step time that is allowed, and the shortest forward that it is meant for.
LIMIT, SHORTEST_FORWARD = 1.07, 0.050
#: Rows of one schedule compute the same in another order.
NORM_TOLERANCE = 1e-4
#: A schedule and the one over the same layers that it is to be no slower than.
RIVALS = {"interleaved-1f1b": "1f1b", "zb-h1": "1f1b+own", "zb-v": "1f1b+own"}


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


def check_norms(rows: list[dict]) -> None:
    """Rows of a schedule have the same gradients, or the benchmark compares nothing."""
    norms: dict[str, dict[str, float]] = {}
    for row in rows:
        schedule = row["row"].split()[1].removesuffix("+own")
        norms.setdefault(schedule, {})[row["row"]] = row["norm"]
    for schedule, of_rows in norms.items():
        if max(of_rows.values()) > (1 + NORM_TOLERANCE) * min(of_rows.values()):
            sys.exit(f"the rows of {schedule} have other gradient norms than each other: {of_rows}")


def verdicts(results: dict) -> Iterator[str]:
    """Each row of mcore against its prediction, and against the row of torch."""
    rows = {row["row"]: row for row in results["rows"]}
    for name, row in rows.items():
        if "predicted" not in row:
            continue
        ratio = median(row["seconds"]) / row["predicted"]
        verdict = f"{name}: {ratio:.3f} of the prediction, "
        if row["costs"][0] < SHORTEST_FORWARD:
            verdict += f"no verdict (a forward takes less than {1000 * SHORTEST_FORWARD:.0f} ms)"
        else:
            verdict += f"{'within' if ratio <= LIMIT else 'ABOVE'} {LIMIT}"
        other = rows.get(name.replace("mcore", "torch").removesuffix("+own"))
        if other is not None:
            speed = median(other["seconds"]) / median(row["seconds"])
            verdict += f"; {speed:.3f} times the tokens/s of torch"
        yield verdict


def rivalries(results: dict) -> Iterator[str]:
    """Each schedule that has less idle time than 1f1b against it, measured and predicted."""
    rows = {row["row"]: row for row in results["rows"]}
    for schedule, rival in RIVALS.items():
        name, other = f"mcore {schedule}", f"mcore {rival}"
        if name not in rows or other not in rows:
            continue
        predicted = rows[name]["predicted"] / rows[other]["predicted"]
        measured = median(rows[name]["seconds"]) / median(rows[other]["seconds"])
        verdict = f"{name}: {measured:.3f} of the time of {other}, {predicted:.3f} predicted, "
        if predicted > 1:
            yield verdict + "no verdict (at these costs it is slower)"
        else:
            yield verdict + ("no slower" if measured <= 1 else "SLOWER")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--schedules", default="gpipe,1f1b,1f1b+own,interleaved-1f1b,zb-h1,zb-v")
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
    check_norms(results["rows"])
    for line in (*verdicts(results), *rivalries(results)):
        print(line)


if __name__ == "__main__":
    main()
