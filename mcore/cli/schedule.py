"""`mcore schedule`: print, compare and draw pipeline schedules, proved, with their figures."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from mcore.cli.timeline_picture import Timeline, draw_timelines
from mcore.errors import ConfigError
from mcore.pipeline_parallel import (
    Costs,
    Pipeline,
    Schedule,
    Simulation,
    build_pipeline,
    simulate,
)
from mcore.pipeline_parallel.actions import format_plan, format_plans
from mcore.pipeline_parallel.timetable import format_timetable
from mcore.topology.placement import StagePlacement
from mcore.training.pipeline_plan import read_schedule

_NAMES = ("gpipe", "1f1b", "interleaved-1f1b", "bounded", "zb-h1", "zb-v")
#: Chunks a rank where --vpp is not given.
_CHUNKS = {"interleaved-1f1b": 2, "zb-v": 2}


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "schedule",
        help="print a pipeline schedule as a table, with its bubble and peak activations; draw it",
        allow_abbrev=False,
    )
    parser.add_argument("--pp", type=int, help="pipeline-parallel size")
    parser.add_argument("--microbatches", type=int, help="microbatches in a step")
    parser.add_argument(
        "--vpp",
        type=int,
        help="model chunks on each pipeline rank; default: 2 for interleaved-1f1b and zb-v, else 1",
    )
    parser.add_argument(
        "--schedule",
        help=f"one of {', '.join(_NAMES)}, or file:PATH with one line of actions a rank, which "
        "says the sizes itself; default: 1f1b, interleaved-1f1b with several chunks a rank, "
        "bounded with --max-in-flight-microbatches",
    )
    parser.add_argument(
        "--group",
        type=int,
        help="microbatches that run through a chunk before the next chunk's turn, for "
        "interleaved-1f1b; default: --pp",
    )
    parser.add_argument(
        "--max-in-flight-microbatches",
        type=int,
        help="microbatches that a rank may hold, for bounded; default: half of --pp",
    )
    for flag, default, meaning in (
        ("--cost-f", 1.0, "a chunk's forward"),
        ("--cost-b", 1.0, "the input-gradient part of a chunk's backward"),
        ("--cost-w", 1.0, "the weight-gradient part; a backward that is not split is b + w"),
        (
            "--cost-comm",
            0.0,
            "a message between two ranks; a rank posts its batches of them one after another",
        ),
    ):
        parser.add_argument(flag, type=float, default=default, help=f"time of {meaning}")
    parser.add_argument(
        "--compare", action="store_true", help="all schedules side by side, for the same model"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the timeline: FILE.svg or FILE.png")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument(
        "--plans",
        action="store_true",
        help="print the actions only, as a file for --schedule and --pipeline-schedule file:PATH",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class _Result:
    """A schedule with its figures."""

    name: str
    chunks: int
    microbatches: int
    pipeline: Pipeline
    simulation: Simulation

    @property
    def title(self) -> str:
        simulation = self.simulation
        return (
            f"{self.name}: {len(simulation.spans)} ranks x {self.chunks} chunk(s), "
            f"{self.microbatches} microbatches; bubble {100 * simulation.bubble:.1f}%, "
            f"at most {max(simulation.peak_in_flight) / self.chunks:g} of them held by a rank"
        )

    def file(self) -> str:
        """The plans as a file that `parse_schedule` reads."""
        pipeline = self.pipeline
        usual = StagePlacement.usual(len(pipeline.plans), self.chunks)
        kind = "usual" if pipeline.placement == usual else "v"
        return f"# {self.title}\nplacement: {kind}\n{format_plans(pipeline.plans)}"

    def record(self) -> dict[str, Any]:
        simulation = self.simulation
        return {
            "schedule": self.name,
            "pp": len(simulation.spans),
            "vpp": self.chunks,
            "microbatches": self.microbatches,
            "plans": [format_plan(plan).split() for plan in self.pipeline.plans],
            "timeline": [
                [[str(span.action), span.start, span.end] for span in spans]
                for spans in simulation.spans
            ],
            "step_time": simulation.step_time,
            "ideal_time": simulation.ideal_time,
            "bubble": simulation.bubble,
            "bubble_over_ideal": simulation.bubble_over_ideal,
            "peak_activations": list(simulation.peak_in_flight),
            "peak_receive_buffers": list(simulation.peak_receives),
        }


def run(args: argparse.Namespace) -> int:
    """Print the schedule, or all of them."""
    if args.compare and args.schedule is not None:
        raise ConfigError(f"--compare shows every schedule: drop --schedule {args.schedule}")
    if args.plans and (args.compare or args.json):
        raise ConfigError("--plans prints one schedule, and nothing else: drop --compare or --json")
    for name in ("pp", "microbatches", "vpp", "group", "max_in_flight_microbatches"):
        size = getattr(args, name)
        if size is not None and size < 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {size}; give a whole number from 1 up")
    results = _compare(args) if args.compare else [_simulate(args, _schedule(args), 1.0)]
    if args.plot is not None:
        draw_timelines([Timeline(r.title, r.simulation) for r in results], args.plot)
    if args.json:
        records = [result.record() for result in results]
        print(json.dumps(records if args.compare else records[0]))
    elif args.compare:
        _print_comparison(args, results)
    elif args.plans:
        print(results[0].file())
    else:
        _print(results[0])
    if args.plot is not None and not (args.json or args.plans):
        print(f"\ndrawn in {args.plot}")
    return 0


def _schedule(args: argparse.Namespace) -> Schedule:
    name: Any = args.schedule or _default(args)
    if name.startswith("file:"):
        return _from_file(args, name.removeprefix("file:"))
    if name not in _NAMES:
        raise ConfigError(f"--schedule {name}: use one of {', '.join(_NAMES)} or file:PATH")
    missing = [f"--{flag}" for flag in ("pp", "microbatches") if getattr(args, flag) is None]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}")
    most = args.max_in_flight_microbatches
    if name == "bounded" and most is None:
        most = max(1, args.pp // 2)
    chunks = _CHUNKS.get(name, 1) if args.vpp is None else args.vpp
    return Schedule(name=name, num_chunks=chunks, group=args.group, max_in_flight=most)


def _default(args: argparse.Namespace) -> str:
    """What training would choose with the same options, see `plan_pipeline`."""
    if args.max_in_flight_microbatches is not None:
        return "bounded"
    return "interleaved-1f1b" if (args.vpp or 1) > 1 else "1f1b"


def _from_file(args: argparse.Namespace, path: str) -> Schedule:
    """The plans of a file; it says the sizes, which may be repeated on the command line."""
    custom = read_schedule(path)
    args.pp = len(custom.plans) if args.pp is None else args.pp
    if args.microbatches is None:
        args.microbatches = custom.num_microbatches
    chunks = custom.num_chunks if args.vpp is None else args.vpp
    return Schedule(
        name="custom",
        num_chunks=chunks,
        custom=custom,
        group=args.group,
        max_in_flight=args.max_in_flight_microbatches,
    )


def _simulate(args: argparse.Namespace, schedule: Schedule, scale: float) -> _Result:
    """Simulate with the costs of a chunk multiplied by `scale`."""
    pipeline = build_pipeline(schedule, args.pp, args.microbatches)
    times = (scale * args.cost_f, scale * args.cost_b, scale * args.cost_w)
    costs = Costs(*times, args.cost_comm)
    result = simulate(pipeline.plans, pipeline.placement, costs, pipeline.programs)
    name = args.schedule if schedule.custom is not None else schedule.name
    return _Result(name, schedule.num_chunks, args.microbatches, pipeline, result)


def _compare(args: argparse.Namespace) -> list[_Result]:
    """Every schedule on the same model: with half as many chunks a rank each costs twice."""
    given = args.vpp or 1
    results = []
    for name in _NAMES:
        chunks = max(2, given) if name == "interleaved-1f1b" else _CHUNKS.get(name, 1)
        options = {
            "schedule": name,
            "vpp": chunks,
            "group": args.group if name == "interleaved-1f1b" else None,
            "max_in_flight_microbatches": (
                args.max_in_flight_microbatches if name == "bounded" else None
            ),
        }
        own = argparse.Namespace(**{**vars(args), **options})
        results.append(_simulate(own, _schedule(own), given / chunks))
    return results


def _print(result: _Result) -> None:
    simulation = result.simulation
    print(
        f"{result.name}: {len(simulation.spans)} ranks, {result.chunks} chunk(s) a rank, "
        f"{result.microbatches} microbatches (F0.3 = forward of chunk 0 on microbatch 3)\n"
    )
    print(format_timetable(simulation))
    print(f"\nstep time            {simulation.step_time:g} (ideal {simulation.ideal_time:g})")
    print(f"bubble               {100 * simulation.bubble:.2f}% of all rank-time")
    print(f"                     {100 * simulation.bubble_over_ideal:.2f}% of the computing time")
    peaks = _list(simulation.peak_in_flight)
    print(f"peak activations     {peaks} (chunk microbatches, by rank)")
    print(f"peak receive buffers {_list(simulation.peak_receives)}")


def _print_comparison(args: argparse.Namespace, results: list[_Result]) -> None:
    print(
        f"{args.pp} ranks, {args.microbatches} microbatches; a rank's layers on one microbatch "
        f"cost F {(args.vpp or 1) * args.cost_f:g}, B {(args.vpp or 1) * args.cost_b:g}, "
        f"W {(args.vpp or 1) * args.cost_w:g}, a message {args.cost_comm:g}\n"
    )
    print(
        f"{'schedule':<18} {'chunks':>6} {'step time':>10} {'idle/total':>10} {'idle/ideal':>10} "
        f"{'peak activations (microbatches of a rank)':>10}"
    )
    for result in results:
        simulation = result.simulation
        peaks = " ".join(f"{peak / result.chunks:g}" for peak in simulation.peak_in_flight)
        print(
            f"{result.name:<18} {result.chunks:>6} {simulation.step_time:>10g} "
            f"{100 * simulation.bubble:>9.2f}% {100 * simulation.bubble_over_ideal:>9.2f}% {peaks}"
        )


def _list(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))
