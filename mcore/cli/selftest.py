"""`mcore selftest`: does mcore compute and communicate right on these machines?"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from mcore.device import device_name
from mcore.errors import McoreError
from mcore.selftest import SelfTest
from mcore.training.initialize import (
    Launch,
    host_group,
    join_world,
    leave_now,
    leave_world,
    read_launch,
)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "selftest",
        help="check collectives, layouts and checkpoints on these machines",
        description="Start it with torchrun on the machines of a coming run. It checks every "
        "collective on every group, measures bandwidth, trains a tiny model at every layout that "
        "fits the number of ranks, and takes one through a checkpoint. Exit status: 0 all is "
        "right, 1 something is wrong.",
    )
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    add(
        "--message-megabytes",
        type=float,
        metavar="MB",
        help="size of the messages whose bandwidth is measured; default: 256 on GPUs, 4 on CPUs",
    )
    add(
        "--shared-dir",
        metavar="DIR",
        help="folder that all machines share, for the checkpoint test; on one machine a temporary "
        "one when absent",
    )
    add("--timeout-minutes", type=int, default=5, metavar="N", help="for a collective; default: 5")
    add("--json", action="store_true", help="print the results as JSON and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the test and print its tables and verdict on rank 0."""
    started = time.perf_counter()
    launch = read_launch()
    world = join_world(launch, args.device, minutes=args.timeout_minutes)
    default = 256.0 if world.device.type == "cuda" else 4.0
    test = SelfTest(
        launch.world_size,
        world.device,
        message_bytes=int((args.message_megabytes or default) * 1e6),
        host=None if world.backend == "gloo" else host_group(args.timeout_minutes),
    )
    printer = _Printer(launch, is_quiet=args.json)
    machines = sorted(set(test.gather(socket.gethostname())))
    printer.line(
        f"mcore self-test: {launch.world_size} processes on {len(machines)} machines, "
        f"{device_name(world.device)}, {world.backend}, torch {torch.__version__}"
    )
    try:
        _collectives(test, printer)
        _layouts(test, printer)
        _checkpoint(test, printer, args.shared_dir, len(machines))
    except (McoreError, RuntimeError) as error:
        sys.stderr.write(f"mcore selftest: rank {launch.rank}: {error}\nFAILED\n")
        leave_now(1)
    seconds = time.perf_counter() - started
    faults = test.faults
    printer.line("")
    for fault in faults[:20]:
        printer.line(f"FAULT: {fault}")
    printer.line(f"{'FAILED' if faults else 'PASSED'} in {seconds:.0f} s")
    if args.json and launch.rank == 0:
        print(json.dumps({**printer.results, "faults": faults, "seconds": seconds}, indent=2))
    leave_world(world.is_owned)
    return 1 if faults else 0


class _Printer:
    """Writes tables on rank 0, and keeps their rows for `--json`."""

    def __init__(self, launch: Launch, *, is_quiet: bool) -> None:
        self.results: dict[str, Any] = {}
        self._prints = launch.rank == 0 and not is_quiet

    def line(self, text: str) -> None:
        if self._prints:
            print(text, flush=True)

    def head(self, section: str, title: str, columns: Sequence[str]) -> None:
        self.results[section] = []
        self._columns = columns
        self.line(f"\n{title}")
        self.line(_aligned(columns))

    def row(self, section: str, cells: Sequence[Any]) -> None:
        self.results[section].append(dict(zip(self._columns, cells, strict=True)))
        self.line(_aligned(cells))


def _collectives(test: SelfTest, printer: _Printer) -> None:
    section = "collectives"
    columns = ["groups", "size", "checks", "result"]
    speeds = ["all-reduce", "all-gather", "reduce-scatter", "send/receive"]
    printer.head(
        section,
        f"collectives, and bus bandwidth in GB/s of {test.message_bytes / 1e6:g} MB messages "
        "(slowest group)",
        [*columns, *speeds],
    )
    for found in test.collectives():
        printer.row(
            section,
            [
                f"{found.layout}: {found.group}",
                found.size,
                found.checks,
                _result(found.passed),
                *(f"{found.slowest[name]:.3g}" for name in speeds),
            ],
        )
    if test.world_size == 1:
        printer.line("  one process: nothing to communicate")


def _layouts(test: SelfTest, printer: _Printer) -> None:
    section = "layouts"
    printer.head(
        section,
        "a tiny model in float64 against one rank without communication",
        ["layout", "loss difference", "norm difference", "result"],
    )
    for compared in test.layouts():
        cells = [f"{compared.loss:.1e}", f"{compared.norm:.1e}", _result(compared.passed)]
        printer.row(section, [compared.layout, *cells])


def _checkpoint(
    test: SelfTest, printer: _Printer, shared: str | None, number_of_machines: int
) -> None:
    section = "checkpoint"
    columns = ["saved at", "continued at", "loss difference", "norm difference", "result"]
    printer.head(section, "checkpoint round trip", columns)
    if shared is None and number_of_machines > 1:
        printer.line(
            "  left out: several machines; give a folder that they share: --shared-dir DIR"
        )
        return
    if shared is not None:
        Path(shared).mkdir(parents=True, exist_ok=True)
    with _own_folder(shared) if test.rank == 0 else nullcontext() as made:
        folder = test.gather(made)[0]
        for trip in test.round_trips(Path(folder)):
            cells = [f"{trip.loss:.1e}", f"{trip.norm:.1e}", _result(trip.passed)]
            printer.row(section, [trip.saved, trip.layout, *cells])


def _own_folder(shared: str | None) -> tempfile.TemporaryDirectory[str]:
    """A folder that is taken away at the end; after a failure others may still write to it."""
    return tempfile.TemporaryDirectory(
        prefix="mcore-selftest-", dir=shared, ignore_cleanup_errors=True
    )


def _result(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def _aligned(cells: Sequence[Any]) -> str:
    first, *others = (str(cell) for cell in cells)
    return "  " + f"{first:24}" + "".join(f"{cell:>17}" for cell in others)
