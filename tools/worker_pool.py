"""A function over many items on several processes, results in the order of the items.

`concurrent.futures` is not used: its workers share one pipe for results, and one that is killed in
the middle of a message leaves the reader waiting for the rest of it for ever. Here each worker has
a pipe of its own, whose end is seen at once.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar, cast

from mcore.errors import McoreError

Item = TypeVar("Item")
Result = TypeVar("Result")

TASKS_IN_FLIGHT = 4  # per worker; bounds the memory when one long item holds up the order


class WorkerLostError(McoreError):
    """A worker process died before its work was done."""


@dataclasses.dataclass(slots=True)
class _Task(Generic[Item, Result]):
    item: Item
    is_done: bool = False
    result: Result | McoreError | None = None


class _Worker(Generic[Item, Result]):
    """A process that applies the function to what it is given, first come first served."""

    def __init__(self, function: Callable[[Item], Result], prepare: Callable[[], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.tasks: collections.deque[_Task[Item, Result]] = collections.deque()
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, function, prepare))
        self._process.daemon = True
        self._process.start()
        theirs.close()  # the worker holds the only one now: when it dies the pipe ends

    def give(self, task: _Task[Item, Result]) -> None:
        try:
            self.connection.send(task.item)
        except OSError as error:
            raise _lost() from error
        self.tasks.append(task)

    def take(self) -> None:
        """Await the result of the oldest task."""
        try:
            result = self.connection.recv()
        except (EOFError, OSError) as error:
            raise _lost() from error
        task = self.tasks.popleft()
        task.is_done, task.result = True, result

    def end(self) -> None:
        self._process.kill()  # it keeps nothing that would be lost
        self._process.join()
        self.connection.close()


def map_in_order(
    function: Callable[[Item], Result],
    items: Iterator[Item],
    workers: int,
    prepare: Callable[[], None],
) -> Iterator[tuple[Item, Result]]:
    """(item, its result) for every item, in order, while `workers` processes work ahead.

    Args:
        function: something that pickle takes.
        items: taken when there is room, `TASKS_IN_FLIGHT` a worker.
        workers: number of processes.
        prepare: called once in each process, before all else.

    Raises:
        McoreError: the first in order that the function or `items` raised. Any other fault of the
            function is a `RuntimeError` with the worker's traceback.
        WorkerLostError: a worker died.
    """
    pool: list[_Worker[Item, Result]] = []
    in_order: collections.deque[_Task[Item, Result]] = collections.deque()
    try:
        pool.extend(_Worker(function, prepare) for _ in range(workers))
        fault: list[McoreError] = []
        for item in _until_fault(items, fault):
            in_order.append(_Task(item))
            _take_results(pool, timeout=0)
            min(pool, key=lambda worker: len(worker.tasks)).give(in_order[-1])
            if len(in_order) >= TASKS_IN_FLIGHT * workers:
                yield _finish(in_order.popleft(), pool)
        while in_order:
            yield _finish(in_order.popleft(), pool)
        if fault:
            raise fault[0]
    finally:
        for worker in pool:
            worker.end()


def _until_fault(items: Iterator[Item], fault: list[McoreError]) -> Iterator[Item]:
    """Items up to the one that cannot be had; the reason is kept until those before it are done."""
    try:
        yield from items
    except McoreError as error:
        fault.append(error)


def _finish(task: _Task[Item, Result], pool: list[_Worker[Item, Result]]) -> tuple[Item, Result]:
    while not task.is_done:
        _take_results(pool, timeout=None)
    if isinstance(task.result, Exception):
        raise task.result
    return task.item, cast(Result, task.result)


def _take_results(pool: list[_Worker[Any, Any]], timeout: float | None) -> None:
    """Take a result of each worker that has one; with no timeout await the first."""
    working = {worker.connection: worker for worker in pool if worker.tasks}
    for connection in wait(list(working), timeout):
        working[cast(Connection, connection)].take()


def _lost() -> WorkerLostError:
    return WorkerLostError("a worker process died, perhaps for lack of memory; try fewer --workers")


def _serve(
    connection: Connection, function: Callable[[Any], Any], prepare: Callable[[], None]
) -> None:
    """A worker's life: until its parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops and ends its workers
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A thread of its own takes items, so that a parent that gives one never waits for a worker
    # that waits to be rid of a result.
    threading.Thread(target=_receive, args=(connection, items), daemon=True).start()
    prepare()
    while True:
        connection.send(_result(function, items.get()))


def _receive(connection: Connection, items: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            items.put(connection.recv())
    finally:
        # The parent is gone, or what it sent cannot be held; the main thread would wait for ever.
        os._exit(1)


def _result(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except McoreError as error:
        return error
    except Exception:  # noqa: BLE001  (told by the parent, which raises it)
        return RuntimeError(f"a worker process failed:\n{traceback.format_exc()}")
