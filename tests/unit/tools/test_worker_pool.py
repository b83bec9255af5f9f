"""Processes that work in order, and what is told when one dies."""

import multiprocessing
import operator
import os
import signal
import time
from pathlib import Path

import pytest

from mcore.errors import DataError
from tools.worker_pool import TASKS_IN_FLIGHT, WorkerLostError, map_in_order


@pytest.fixture(autouse=True)
def before():
    """A hard limit of time, and the processes that other tests have left at work."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(240)
    yield set(multiprocessing.active_children())
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def nothing():
    pass


def wait_a_while(seconds):
    time.sleep(seconds)
    return os.getpid()


def refuse_odd(number):
    if number % 2:
        raise DataError(f"{number} is odd")
    return number


def large_result(mark):
    Path(mark).touch()
    return bytes(64 << 20)


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def end_at_three(number):
    if number == 3:
        os._exit(9)
    return number


def test_results_come_in_the_order_of_the_items_and_of_every_process(before):
    times = [0.3, *[0.01] * 20]
    found = list(map_in_order(wait_a_while, iter(times), 2, nothing))
    assert [item for item, _ in found] == times
    assert len({pid for _, pid in found}) == 2
    assert set(multiprocessing.active_children()) <= before


def test_few_items_are_taken_ahead(before):
    taken = iter(range(1_000))
    results = map_in_order(operator.neg, taken, 2, nothing)
    assert next(results) == (0, 0)
    assert next(taken) == TASKS_IN_FLIGHT * 2
    results.close()
    assert set(multiprocessing.active_children()) <= before


def test_no_items():
    assert list(map_in_order(operator.neg, iter(()), 2, nothing)) == []


def test_the_first_fault_in_order_is_raised_after_the_results_before_it():
    results = map_in_order(refuse_odd, iter([0, 2, 5, 7]), 2, nothing)
    assert [next(results), next(results)] == [(0, 0), (2, 2)]
    with pytest.raises(DataError, match="5 is odd"):
        next(results)


def test_a_fault_of_the_items_is_raised_after_the_results_before_it():
    def items():
        yield from (0, 2, 5)
        raise DataError("the input ends")

    with pytest.raises(DataError, match="5 is odd"):
        list(map_in_order(refuse_odd, items(), 2, nothing))


def test_an_item_that_a_worker_cannot_hold_ends_the_run():
    with pytest.raises(WorkerLostError):
        list(map_in_order(operator.neg, iter([Unreadable()]), 1, nothing))


def test_another_fault_shows_where_it_was():
    with pytest.raises(RuntimeError, match=r"(?s)worker process failed.*ZeroDivisionError"):
        list(map_in_order((1).__floordiv__, iter([0]), 1, nothing))


def test_a_worker_that_ends_is_told():
    with pytest.raises(WorkerLostError, match="a worker process died"):
        list(map_in_order(end_at_three, iter(range(8)), 2, nothing))


def test_a_worker_killed_in_the_middle_of_a_result_is_told(tmp_path, before):
    """Nobody waits for the rest of what it was about to send."""

    def items():
        yield tmp_path / "at_work"
        while not (tmp_path / "at_work").exists():
            time.sleep(0.01)
        time.sleep(0.5)  # it is sending now, far more than a pipe holds
        (worker,) = set(multiprocessing.active_children()) - before
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        yield tmp_path / "more"

    with pytest.raises(WorkerLostError):
        list(map_in_order(large_result, items(), 1, nothing))
