"""The words of a launcher (deepspeed, torchrun, python) before those of the program."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch.distributed.run import get_args_parser

from mcore.errors import ConfigError

#: What torchrun has no counterpart for, because whoever starts it chooses the machines.
_MACHINES = ("--hostfile", "-H", "--include", "-i", "--exclude", "-e", "--launcher")
#: Options of python that take the next word.
_WITH_VALUE = ("-W", "-X")


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher starts.

    Attributes:
        line: the equivalent torchrun command, for every machine where there are several; None where
            it is what was given.
        world_size: processes; None where there is no launcher to say so.
        words: of the program.
        launcher: its name.
    """

    line: str | None
    world_size: int | None
    words: list[str]
    launcher: str | None = None


def read_launcher(words: Sequence[str]) -> Launched:
    """Tell the words of a program from those that start it.

    Args:
        words: `deepspeed ...`, `torchrun ...`, `python ...`, `SCRIPT.py ...` or the program's own.

    Raises:
        ConfigError: a launcher's option that is wrong or leaves the number of processes open.
    """
    if not words or words[0].startswith("-"):
        return Launched(None, None, list(words))
    first = os.path.basename(words[0])
    if first == "deepspeed":
        return as_torchrun(words[1:])
    if first == "torchrun":
        return _torchrun(words[1:])
    if re.fullmatch(r"python[\d.]*", first):
        return _python(words[1:])
    return Launched(None, None, list(words[1:] if first.endswith(".py") else words))


def _python(words: Sequence[str]) -> Launched:
    """Read `python SCRIPT.py ...` or `python -m MODULE ...`."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    if rest[:2] == ["-m", "torch.distributed.run"]:
        return _torchrun(rest[2:])
    return Launched(None, None, rest[2 if rest[:1] == ["-m"] else 1 :])


def _torchrun(words: Sequence[str]) -> Launched:
    """Read `torchrun --nnodes N --nproc-per-node M SCRIPT ...`."""
    parser = get_args_parser()
    parser.error = _refuse_as("torchrun")  # type: ignore[assignment, method-assign]
    args = parser.parse_args(list(words))
    each = _number("--nproc-per-node", args.nproc_per_node)
    machines = _number("--nnodes", args.nnodes.rpartition(":")[2])  # the most that may join
    rest = [args.training_script, *args.training_script_args]
    own = read_launcher(rest).words if args.no_python else rest[1:]
    return Launched(None, machines * each, own, "torchrun")


def _number(flag: str, word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(
            f"torchrun: {flag} {word} is no number of processes; write one from 1 up, or leave "
            "torchrun's words out and give --world-size N"
        )
    return int(word)


def as_torchrun(words: Sequence[str]) -> Launched:
    """Read `deepspeed --num_nodes N --num_gpus M SCRIPT ...`.

    Args:
        words: those after `deepspeed`.

    Raises:
        ConfigError: an option without counterpart, or a number that is not given.
    """
    parser = argparse.ArgumentParser(prog="deepspeed", add_help=False, allow_abbrev=False)
    parser.error = _refuse_as("deepspeed")  # type: ignore[assignment, method-assign]
    parser.add_argument("--num_nodes", "--num-nodes", type=int, default=1)
    parser.add_argument("--num_gpus", "--num-gpus", type=int)
    parser.add_argument("--master_addr", default="HOST")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("--no_local_rank", action="store_true")
    for name in _MACHINES:
        parser.add_argument(name)
    parser.add_argument("script")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    args = parser.parse_args(list(words))
    if args.num_gpus is None or args.num_gpus < 1 or args.num_nodes < 1:
        raise ConfigError(
            "deepspeed: give --num_gpus N, the GPUs of a machine, and --num_nodes N where there "
            "are several machines; both from 1 up"
        )
    line = ["torchrun"]
    if args.num_nodes > 1:
        place = f"{args.master_addr}:{args.master_port}"
        line += ["--nnodes", str(args.num_nodes), "--nproc-per-node", str(args.num_gpus)]
        line += ["--rdzv-backend", "c10d", "--rdzv-endpoint", place]
    else:
        line += ["--nproc-per-node", str(args.num_gpus)]
    line += ["-m"] if args.module else []
    return Launched(
        shlex.join([*line, args.script, *(w for w in args.words if w != "--json")]),
        args.num_nodes * args.num_gpus,
        args.words,
        "deepspeed",
    )


def _refuse_as(launcher: str) -> Callable[[str], NoReturn]:
    """What a parser does with a wrong word: an error of mcore."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{launcher}: {message}")

    return refuse
