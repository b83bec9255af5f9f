"""Start the ranks of a benchmark's row on this machine and wait for all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_ranks(
    command: Sequence[str],
    ranks: int,
    environment: Mapping[str, str],
    timeout: float,
    python: str = sys.executable,
) -> None:
    """Run a Python program once per rank, with what torch.distributed reads in its environment.

    Args:
        command: program and arguments.
        ranks: how many.
        environment: variables of the program's own; mcore is importable in any case.
        timeout: seconds after which the ranks are ended.
        python: interpreter.

    Raises:
        SystemExit: a rank failed, by its exit code.
        subprocess.TimeoutExpired: a rank took longer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = dict(
        os.environ,
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PYTHONPATH=str(ROOT),
        PYTHONWARNINGS="ignore",
    )
    shared.update(environment)
    started = [
        subprocess.Popen(
            [python, *command],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"{' '.join(command)} failed with exit codes {codes}")
