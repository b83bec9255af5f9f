"""`mcore ckpt`: look into checkpoints, check them, compare them, write them out whole."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from mcore.checkpoint import (
    CheckpointReader,
    complete_iterations,
    differences,
    dump,
    find_checkpoint,
    latest_iteration,
    leftovers,
    unfinished_iterations,
    verify,
)
from mcore.errors import CheckpointError, ConfigError


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its sub-commands."""
    parser = subparsers.add_parser(
        "ckpt", help="look into checkpoints, check and compare them", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspecting = _add(commands, "inspect", inspect, "tensors, sizes and configuration")
    inspecting.add_argument("--json", action="store_true", help="print JSON only")
    verifying = _add(
        commands,
        "verify",
        verify_checkpoint,
        "check every byte and every key; exit status 0 good, 1 damaged, 2 usage",
    )
    verifying.add_argument(
        "--all", action="store_true", help="every checkpoint of the save root, not only the newest"
    )
    comparing = commands.add_parser(
        "diff",
        help="in what two checkpoints differ; exit status 0 same state, 1 different, 2 usage",
        allow_abbrev=False,
    )
    comparing.add_argument("first", metavar="A", help="save root, or one iteration's directory")
    comparing.add_argument("second", metavar="B", help="save root, or one iteration's directory")
    comparing.set_defaults(run=diff)
    dumping = _add(
        commands,
        "dump",
        dump_checkpoint,
        "one safetensors file with whole tensors, no layout in it",
    )
    dumping.add_argument("--out", required=True, metavar="FILE", help="file to write")


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Any,
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, allow_abbrev=False)
    parser.add_argument("directory", metavar="DIR", help="save root, or one iteration's directory")
    parser.add_argument(
        "--ckpt-step", type=int, metavar="N", help="iteration; the pointer file's when absent"
    )
    parser.set_defaults(run=run)
    return parser


def _require_directory(path: str) -> Path:
    """The path, which has to hold something of ours: anything else is a wrong command line."""
    directory = Path(path)
    ours = (
        (directory / "metadata.json").exists()
        or directory.name.startswith("iter_")
        or (directory / "latest_checkpointed_iteration.txt").exists()
        or complete_iterations(directory)
        or unfinished_iterations(directory)
    )
    if not directory.is_dir() or not ours:
        raise ConfigError(
            f"{path} is no save root and no directory of an iteration; give one that holds "
            "latest_checkpointed_iteration.txt or metadata.json"
        )
    return directory


def _open(args: argparse.Namespace) -> CheckpointReader:
    return CheckpointReader(_require_directory(args.directory), args.ckpt_step)


def verify_checkpoint(args: argparse.Namespace) -> int:
    """`mcore ckpt verify`: reads every byte in one process, without GPU or process group."""
    root = _require_directory(args.directory)
    iterations = complete_iterations(root) if args.all else [args.ckpt_step]
    if not iterations:
        raise CheckpointError(f"there is no complete checkpoint in {root}")
    directories = [find_checkpoint(root, iteration) for iteration in iterations]
    if args.all and latest_iteration(root) is not None:
        find_checkpoint(root)  # the pointer, too, has to name a complete one
    damaged = False
    for directory in directories:
        problems = verify(directory)
        damaged = damaged or bool(problems)
        for problem in problems:
            print(problem)
        if not problems:
            metadata = CheckpointReader(directory).metadata
            total = sum(record.nbytes for record in metadata.files.values())
            print(
                f"{directory} is good: {len(metadata.tensors)} tensors, {len(metadata.files)} "
                f"files, {total:,} bytes"
            )
            for name in leftovers(directory, metadata):
                print(f"  {name} is left over from a save that died")
    for iteration in unfinished_iterations(root):
        print(f"iteration {iteration} was never finished; no run will load it")
    return 1 if damaged else 0


def diff(args: argparse.Namespace) -> int:
    """`mcore ckpt diff`."""
    first = CheckpointReader(_require_directory(args.first))
    second = CheckpointReader(_require_directory(args.second))
    count = 0
    for difference in differences(first, second):
        print(f"{difference.what}: {difference.how}")
        count += 1
    print(f"{count} differences" if count else "the same state")
    return 1 if count else 0


def dump_checkpoint(args: argparse.Namespace) -> int:
    """`mcore ckpt dump`."""
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"{out} exists already; name a new file with --out")
    reader = _open(args)
    count = dump(reader, out)
    print(f"wrote {count} tensors of {reader.directory} to {out}")
    return 0


def inspect(args: argparse.Namespace) -> int:
    """`mcore ckpt inspect`."""
    reader = _open(args)
    if args.json:
        print(json.dumps(_as_json(reader)))
        return 0
    metadata = reader.metadata
    print(f"{reader.directory}: iteration {metadata.iteration}")
    print(f"written by {', '.join(f'{k} {v}' for k, v in metadata.written_by.items())}")
    print(f"layout of rank states: {json.dumps(metadata.layout)}")
    print(f"files: {len(metadata.files)}, {sum(f.nbytes for f in metadata.files.values()):,} bytes")
    for family, (count, elements, nbytes) in _families(reader).items():
        print(f"{family}: {count} tensors, {elements:,} elements, {nbytes:,} bytes")
    print("tensors")
    for key in reader.keys():  # noqa: SIM118
        record = metadata.tensors[key]
        dtype = str(record.dtype).removeprefix("torch.")
        print(f"  {key} {list(record.shape)} {dtype}, {len(record.chunks)} chunks")
    print("state")
    print(json.dumps(reader.common, indent=2, sort_keys=True))
    return 0


def _families(reader: CheckpointReader) -> dict[str, tuple[int, int, int]]:
    """Tensors, elements and bytes by the part of the key before the first dot."""
    totals: dict[str, tuple[int, int, int]] = {}
    for key in reader.keys():  # noqa: SIM118
        record = reader.metadata.tensors[key]
        elements = math.prod(record.shape)
        before = totals.get(key.partition(".")[0], (0, 0, 0))
        added = (1, elements, elements * record.dtype.itemsize)
        totals[key.partition(".")[0]] = tuple(a + b for a, b in zip(before, added, strict=True))  # type: ignore[assignment]
    return totals


def _as_json(reader: CheckpointReader) -> dict[str, Any]:
    metadata = reader.metadata
    return {
        "directory": str(reader.directory),
        "iteration": metadata.iteration,
        "written_by": metadata.written_by,
        "layout": metadata.layout,
        "files": {name: record.nbytes for name, record in sorted(metadata.files.items())},
        "tensors": {
            key: {
                "shape": list(metadata.tensors[key].shape),
                "dtype": str(metadata.tensors[key].dtype).removeprefix("torch."),
                "chunks": len(metadata.tensors[key].chunks),
            }
            for key in reader.keys()  # noqa: SIM118
        },
        "state": reader.common,
    }
