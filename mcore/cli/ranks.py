"""`mcore ranks`: who is in which group."""

from __future__ import annotations

import argparse
import json

from mcore.topology.rank_layout import DEFAULT_ORDER, RankLayout


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "ranks", help="print every process group of a layout", allow_abbrev=False
    )
    for axis, meaning in (
        ("tp", "tensor"),
        ("pp", "pipeline"),
        ("cp", "context"),
        ("dp", "data"),
    ):
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"{meaning}-parallel size")
    parser.add_argument(
        "--order", default=DEFAULT_ORDER, help="axes from fastest to slowest varying rank"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the groups of the layout."""
    layout = RankLayout(tp=args.tp, cp=args.cp, dp=args.dp, pp=args.pp, order=args.order)
    groups = dict(layout.named_groups())
    if args.json:
        print(json.dumps(groups))
        return 0
    print(f"{layout.world_size} ranks, order {layout.order} (leftmost varies fastest)\n")
    print("rank  " + "  ".join(f"{axis:>4}" for axis in layout.sizes))
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        print(f"{rank:>4}  " + "  ".join(f"{coords[axis]:>4}" for axis in layout.sizes))
    print()
    for name, members in groups.items():
        print(f"{name:<19}" + " ".join(f"[{','.join(map(str, ranks))}]" for ranks in members))
    return 0
