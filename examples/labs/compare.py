"""Whether two runs had the same losses: compares their `--metrics-jsonl` files.

python -m examples.labs.compare FIRST.jsonl SECOND.jsonl --tolerance 1e-5
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path


def read_losses(path: Path) -> dict[int, float]:
    """Training loss by iteration."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {r["iteration"]: float(r["lm_loss"]) for r in records if "lm_loss" in r}


def main() -> int:
    """Print the losses of the iterations that both have; 0 if all agree, 1 if not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="default: 1e-5")
    args = parser.parse_args()
    first, second = read_losses(args.first), read_losses(args.second)
    both = sorted(first.keys() & second.keys())
    differences = [abs(first[n] - second[n]) for n in both]
    worst = max((math.inf if math.isnan(d) else d for d in differences), default=math.inf)
    print(f"{'iteration':>10} {args.first.stem:>16} {args.second.stem:>16}  difference")
    for number in both:
        a, b = first[number], second[number]
        print(f"{number:10} {a:16.9f} {b:16.9f}  {abs(a - b):.1e}")
    agrees = worst <= args.tolerance
    verdict = "the losses agree" if agrees else "THE LOSSES DIFFER"
    print(f"{verdict}: largest difference {worst:.1e}, allowed {args.tolerance:g}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
