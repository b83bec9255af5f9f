"""Run a function on several gloo ranks on this machine, for tests.

Workers are started once per world size and reused, and forked from a process that has imported
torch already, since that import takes seconds. Under torchrun the ranks that exist already are used
instead, see `mcore.testing.torchrun`.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore import parallel_state
from mcore.errors import LostPeerError
from mcore.testing.answers import (
    GRACE_SECONDS,
    START_SECONDS,
    Answer,
    WorkerError,
    answer,
    pack_work,
    raise_error,
)
from mcore.testing.torchrun import torchrun_world


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run `fn(*args)` on every rank of a gloo world and return the results in rank order.

    Under torchrun rank 0's arguments are everybody's, and its results are judged: on the other
    ranks this does what rank 0 asks for until rank 0 ends, and then skips the test. A function that
    takes longer than the timeout ends the whole job there, with its stack on standard error.

    Args:
        fn: a module-level function; torch.distributed is initialised when it is called, and model
            parallelism is not. Whatever it initialises is destroyed afterwards.
        world_size: number of ranks.
        *args: picklable arguments, the same for every rank.
        timeout: seconds, after which every rank's stack is shown and the workers are killed.

    Raises:
        WorkerError: a rank ended, hung, or raised something that cannot be sent here.
        SkipTest: under torchrun, which started another number of ranks, or this is not rank 0.
        Exception: what the first failing rank raised, with its traceback as the cause.
    """
    if "RANK" in os.environ:
        return _run_under_torchrun(fn, world_size, args, timeout)
    pool = _pools().get(world_size)
    if pool is None or not pool.is_usable():
        pool = _pools()[world_size] = _WorkerPool(world_size)
    return pool.run(fn, args, timeout)


def shutdown_workers() -> None:
    """End every worker process."""
    for pool in _pools().values():
        pool.kill()
    _pools().clear()


def preload_in_workers(module: str) -> None:
    """Import a module once, before workers are forked, rather than in each of them.

    It has to be importable from the working directory, and called before the first workers start.

    Args:
        module: its full name.
    """
    if module not in _preloaded():
        _preloaded().append(module)


@functools.cache
def _preloaded() -> list[str]:
    return [__name__]


@functools.cache
def _pools() -> dict[int, _WorkerPool]:
    atexit.register(shutdown_workers)
    return {}


def _run_under_torchrun(
    fn: Callable[..., Any], size: int, args: tuple[Any, ...], timeout: float
) -> list[Any]:
    started = int(os.environ["WORLD_SIZE"])
    if started != size:
        raise unittest.SkipTest(f"needs {size} ranks, torchrun started {started}")
    if serve_under_torchrun():
        raise unittest.SkipTest("rank 0 judges this test; this rank took part in it")
    return torchrun_world().run(fn, args, timeout)


def serve_under_torchrun() -> bool:
    """Where torchrun started this process and it is not rank 0: do what rank 0's tests ask for.

    For a test session that leaves the tests themselves to rank 0, which has to call it as well.

    Returns:
        Whether it is such a process; rank 0 has ended, then.
    """
    if "RANK" not in os.environ:
        return False
    if torchrun_world().rank == 0:
        _let_go_at_exit()
        return False
    torchrun_world().serve()
    return True


@functools.cache
def _let_go_at_exit() -> None:
    atexit.register(torchrun_world().end)


class _WorkerPool:
    """One world of worker processes, each at the other end of a pipe."""

    def __init__(self, world_size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="mcore-test-"))
        # Workers are forked from one server that has imported modules, and has done nothing else.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_preloaded())
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_worker_main, args=(rank, world_size, str(self._folder), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._wait_until_started()

    def _wait_until_started(self) -> None:
        """A loaded machine may take its time here: it does not count as the function's."""
        deadline = time.monotonic() + START_SECONDS
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerError(
                    f"rank {rank} did not start in {START_SECONDS:.0f} s\n{self._dump_and_kill()}"
                )
            self._receive(rank, pipe)

    def is_usable(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        work = pack_work(fn, args)
        for pipe in self._pipes:
            pipe.send((list(sys.path), work))
        answers: dict[int, Answer] = {}
        failed: int | None = None
        deadline = time.monotonic() + timeout
        while len(answers) < len(self._pipes):
            waiting: dict[Any, int] = {
                pipe: r for r, pipe in enumerate(self._pipes) if r not in answers
            }
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in map(_as_pipe, ready):
                rank = waiting[pipe]
                answers[rank] = self._receive(rank, pipe)
                if failed is None and answers[rank][0] == "error":
                    # The others may wait for this rank; if they all fail too, the world lives on.
                    failed, deadline = rank, min(deadline, time.monotonic() + GRACE_SECONDS)
        if failed is None and len(answers) < len(self._pipes):
            raise WorkerError(f"no answer after {timeout} s\n{self._dump_and_kill()}")
        if len(answers) < len(self._pipes):
            self.kill()
        if failed is not None:
            failed = _cause(answers, failed)
            raise_error(failed, answers[failed])
        return [answers[rank][1] for rank in sorted(answers)]

    def _receive(self, rank: int, pipe: Connection) -> Answer:
        try:
            received: Answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            self.kill()
            raise WorkerError(f"rank {rank} ended with exit code {code}") from None
        return received

    def _dump_and_kill(self) -> str:
        for process in self._processes:
            if process.pid and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        stacks = [path.read_text() for path in sorted(self._folder.glob("stack*"))]
        self.kill()
        return "\n".join(f"--- rank {rank}\n{stack}" for rank, stack in enumerate(stacks))

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
        shutil.rmtree(self._folder, ignore_errors=True)


def _cause(answers: dict[int, Answer], first: int) -> int:
    """The rank whose error is the reason: rather not one that only lost another."""
    failing = [rank for rank, given in answers.items() if given[0] == "error"]
    reasons = (rank for rank in failing if not isinstance(answers[rank][1], LostPeerError))
    return next(reasons, first)


def _as_pipe(waited: Any) -> Connection:
    assert isinstance(waited, Connection)
    return waited


def _worker_main(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    stack_file = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115  (open for life)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    pipe.send_bytes(pickle.dumps(("result", None, "")))  # started
    while True:
        try:
            path, work = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        pipe.send_bytes(answer(work))
        # Not before: it makes the ranks fail that wait for this one, which failed first.
        parallel_state.destroy_model_parallel()
