"""Run a function on several gloo ranks on this machine, for tests.

Workers are started once per world size and reused, and forked from a process that has imported
torch already, since that import takes seconds. Under torchrun the ranks that exist already are used
instead.
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
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore import parallel_state
from mcore.errors import McoreError
from mcore.topology.collectives import all_gather_object
from mcore.topology.group import Group

_GRACE_SECONDS = 2.0
_START_SECONDS = 300.0


class WorkerError(McoreError, RuntimeError):
    """A rank failed; the message holds its traceback, or every rank's stack after a timeout."""


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run `fn(*args)` on every rank of a gloo world and return the results in rank order.

    Args:
        fn: a module-level function; torch.distributed is initialised when it is called, and model
            parallelism is not. Whatever it initialises is destroyed afterwards.
        world_size: number of ranks.
        *args: picklable arguments, the same for every rank.
        timeout: seconds, after which every rank's stack is shown and the workers are killed.

    Raises:
        WorkerError: a rank ended, hung, or raised something that cannot be sent here.
        Exception: what the first failing rank raised, with its traceback as the cause.
    """
    if "RANK" in os.environ:
        return _run_in_existing_world(fn, world_size, args)
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


def _run_in_existing_world(fn: Callable[..., Any], size: int, args: tuple[Any, ...]) -> list[Any]:
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != size:
        raise unittest.SkipTest(f"needs {size} ranks, torchrun started {world_size}")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = Group("world", tuple(range(size)), dist.get_rank(), dist.group.WORLD)
    try:
        return all_gather_object(fn(*args), group)
    finally:
        parallel_state.destroy_model_parallel()


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
        deadline = time.monotonic() + _START_SECONDS
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerError(
                    f"rank {rank} did not start in {_START_SECONDS:.0f} s\n{self._dump_and_kill()}"
                )
            self._receive(rank, pipe)

    def is_usable(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        payload = pickle.dumps((fn, args))
        for pipe in self._pipes:
            pipe.send((list(sys.path), payload))
        answers: dict[int, tuple[str, Any, str]] = {}
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
                    failed, deadline = rank, min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failed is None and len(answers) < len(self._pipes):
            raise WorkerError(f"no answer after {timeout} s\n{self._dump_and_kill()}")
        if len(answers) < len(self._pipes):
            self.kill()
        if failed is not None:
            _raise(failed, answers[failed])
        return [answers[rank][1] for rank in sorted(answers)]

    def _receive(self, rank: int, pipe: Connection) -> tuple[str, Any, str]:
        try:
            answer: tuple[str, Any, str] = pipe.recv()
        except EOFError:
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            self.kill()
            raise WorkerError(f"rank {rank} ended with exit code {code}") from None
        return answer

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


def _as_pipe(waited: Any) -> Connection:
    assert isinstance(waited, Connection)
    return waited


def _raise(rank: int, answer: tuple[str, Any, str]) -> None:
    _, error, trace = answer
    cause = WorkerError(f"rank {rank}:\n{trace}")
    if isinstance(error, Exception):
        raise error from cause
    raise cause


def _worker_main(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    stack_file = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115  (open for life)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    pipe.send(("result", None, ""))  # started
    while True:
        try:
            path, payload = pipe.recv()
        except EOFError:
            return
        sys.path[:] = path
        pipe.send(_answer(payload))


def _answer(payload: bytes) -> tuple[str, Any, str]:
    try:
        fn, args = pickle.loads(payload)
        result = fn(*args)
        pickle.dumps(result)
        return "result", result, ""
    except Exception as error:  # noqa: BLE001  (whatever a test raises travels to the parent)
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  (an exception that cannot travel is sent as text)
            return "error", None, trace
        return "error", error, trace
    finally:
        parallel_state.destroy_model_parallel()
