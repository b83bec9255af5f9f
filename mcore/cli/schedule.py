"""`mcore schedule`: print a pipeline schedule, proved, with its figures."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mcore.pipeline_parallel import Costs, Pipeline, Simulation, build_pipeline, simulate
from mcore.pipeline_parallel.actions import format_plan
from mcore.pipeline_parallel.timetable import format_timetable


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "schedule",
        help="print a pipeline schedule as a table, with its bubble and peak activations",
        allow_abbrev=False,
    )
    parser.add_argument("--pp", type=int, required=True, help="pipeline-parallel size")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches in a step")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks on each pipeline rank")
    parser.add_argument(
        "--schedule",
        choices=("1f1b", "interleaved-1f1b"),
        help="default: 1f1b, interleaved-1f1b with more than one chunk a rank",
    )
    parser.add_argument(
        "--group",
        type=int,
        help="microbatches that run through a chunk before the next chunk's turn; default: --pp",
    )
    for flag, default, meaning in (
        ("--cost-f", 1.0, "a chunk's forward"),
        ("--cost-b", 1.0, "the input-gradient part of a chunk's backward"),
        ("--cost-w", 1.0, "the weight-gradient part of a chunk's backward"),
        ("--cost-comm", 0.0, "a message between two ranks"),
    ):
        parser.add_argument(flag, type=float, default=default, help=f"time of {meaning}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the schedule."""
    schedule = args.schedule or ("1f1b" if args.vpp == 1 else "interleaved-1f1b")
    pipeline = build_pipeline(schedule, args.pp, args.microbatches, args.vpp, args.group)
    costs = Costs(args.cost_f, args.cost_b, args.cost_w, args.cost_comm)
    result = simulate(pipeline.plans, pipeline.placement, costs, pipeline.programs)
    if args.json:
        print(json.dumps(_record(schedule, args, pipeline, result)))
        return 0
    print(
        f"{schedule}: {args.pp} ranks, {args.vpp} chunk(s) a rank, {args.microbatches} microbatches"
        f" (F0.3 = forward of chunk 0 on microbatch 3)\n"
    )
    print(format_timetable(result))
    print(f"\nstep time            {result.step_time:g} (ideal {result.ideal_time:g})")
    print(f"bubble               {100 * result.bubble:.2f}% of all rank-time")
    print(f"                     {100 * result.bubble_over_ideal:.2f}% of the computing time")
    print(f"peak activations     {_list(result.peak_in_flight)} (chunk microbatches, by rank)")
    print(f"peak receive buffers {_list(result.peak_receives)}")
    return 0


def _record(
    schedule: str, args: argparse.Namespace, pipeline: Pipeline, result: Simulation
) -> dict[str, Any]:
    return {
        "schedule": schedule,
        "pp": args.pp,
        "vpp": args.vpp,
        "microbatches": args.microbatches,
        "plans": [format_plan(plan).split() for plan in pipeline.plans],
        "timeline": [
            [[str(span.action), span.start, span.end] for span in spans] for spans in result.spans
        ],
        "step_time": result.step_time,
        "ideal_time": result.ideal_time,
        "bubble": result.bubble,
        "bubble_over_ideal": result.bubble_over_ideal,
        "peak_activations": list(result.peak_in_flight),
        "peak_receive_buffers": list(result.peak_receives),
    }


def _list(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))
