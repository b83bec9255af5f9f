"""A command of DeepSpeed's launcher as torchrun's."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from mcore.errors import ConfigError

#: What torchrun has no counterpart for, because whoever starts it chooses the machines.
_MACHINES = ("--hostfile", "-H", "--include", "-i", "--exclude", "-e", "--launcher")


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher starts.

    Attributes:
        line: the equivalent torchrun command, for every machine where there are several.
        world_size: processes.
        words: of the program.
    """

    line: str
    world_size: int
    words: list[str]


def as_torchrun(words: Sequence[str]) -> Launched:
    """Read `deepspeed --num_nodes N --num_gpus M SCRIPT ...`.

    Args:
        words: those after `deepspeed`.

    Raises:
        ConfigError: an option without counterpart, or a number that is not given.
    """
    parser = _Parser(prog="deepspeed", add_help=False, allow_abbrev=False)
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
    )


class _Parser(argparse.ArgumentParser):
    """Tells what is wrong as an error of mcore."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"deepspeed: {message}")
