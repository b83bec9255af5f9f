"""The ranks that torchrun has started, as a place to run functions in.

Rank 0 runs the tests. The others do what it asks for, as the workers of a pool do: arguments,
folders and verdicts are rank 0's alone.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from mcore import parallel_state
from mcore.testing.answers import (
    GRACE_SECONDS,
    START_SECONDS,
    Answer,
    WorkerError,
    answer,
    pack_error,
    pack_work,
    raise_error,
)

#: A `torch.distributed.Store`; its annotations know nothing of the bytes that it stores.
Store: TypeAlias = Any

_FOR_EVER = timedelta(days=7)
_STDERR = 2  # as a number: it is there whatever stands in for `sys.stderr`


@functools.cache
def torchrun_world() -> TorchrunWorld:
    """The world of this process."""
    return TorchrunWorld()


class TorchrunWorld:
    """What rank 0 asks of the others, and their answers, go through torchrun's own store.

    Every function finds a gloo world of its own, and that world ends with it: so nothing is left
    over for the next one, and ranks that wait for one which failed learn of it.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self) -> None:
        self._store: Store
        self._store, self.rank, self.size = next(
            dist.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS))
        )
        self._number = 0
        self._has_ended = False

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Run a function on every rank; for rank 0.

        Raises:
            WorkerError: another rank did not answer.
            Exception: what the first failing rank raised.
        """
        work = pack_work(fn, args)
        store = self._next()  # after what may fail here alone: numbers agree on all ranks
        store.set("work", pickle.dumps((list(sys.path), work, timeout)))
        _wait_for(store, "ready", range(1, self.size), START_SECONDS)
        started = time.monotonic()
        self._take_part(store, work, timeout)
        left = timeout + GRACE_SECONDS - (time.monotonic() - started)
        _wait_for(store, "answer", range(self.size), max(left, GRACE_SECONDS))
        answers: list[Answer] = [
            pickle.loads(store.get(f"answer {rank}")) for rank in range(self.size)
        ]
        if store.check(["failed first"]):
            first = int(store.get("failed first"))
            raise_error(first, answers[first])
        return [result for _, result, _ in answers]

    def serve(self) -> None:
        """Take part in all that rank 0 asks for until it ends; for the other ranks."""
        while not self._has_ended:
            store = self._next()
            store.wait(["work"], _FOR_EVER)
            packed = store.get("work")
            if not packed:
                self._has_ended = True
                return
            sys.path[:], work, timeout = pickle.loads(packed)
            store.set(f"ready {self.rank}", b"")
            self._take_part(store, work, timeout)

    def end(self) -> None:
        """Let the other ranks go; for rank 0."""
        self._next().set("work", b"")

    def _next(self) -> Store:
        self._number += 1
        return dist.PrefixStore(f"mcore.testing/{self._number}", self._store)

    def _take_part(self, store: Store, work: bytes, timeout: float) -> None:
        try:
            with self._world(store, timeout), _limited(timeout + GRACE_SECONDS):
                # Told before the world ends: that makes the ranks fail which wait for this one.
                self._tell(store, answer(work))
        except RuntimeError as error:  # of the world; what the work raises is its answer
            self._tell(store, pack_error(error))

    def _tell(self, store: Store, packed: bytes) -> None:
        store.set(f"answer {self.rank}", packed)
        if pickle.loads(packed)[0] == "error":
            store.compare_set("failed first", "", str(self.rank))

    @contextmanager
    def _world(self, store: Store, timeout: float) -> Iterator[None]:
        if dist.is_initialized():  # by the tests' own code, which it belongs to
            yield
            parallel_state.destroy_model_parallel()
            return
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=timeout),
        )
        try:
            yield
        finally:
            try:
                parallel_state.destroy_model_parallel()
            finally:  # what is left would be taken for a world of the tests' own
                if dist.is_initialized():
                    dist.destroy_process_group()
                gc.collect()  # connections close with the last reference to a group


def _wait_for(store: Store, what: str, ranks: Iterable[int], seconds: float) -> None:
    names = {f"{what} {rank}": rank for rank in ranks}
    try:
        if names:
            store.wait(list(names), timedelta(seconds=seconds))
    except dist.DistStoreError as error:
        late = [rank for name, rank in names.items() if not store.check([name])]
        raise WorkerError(f"no {what} of ranks {late} after {seconds:.0f} s") from error


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End the process, and so the job, with its stacks on standard error if it takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
