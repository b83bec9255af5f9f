"""What a rank makes of the function it is sent: an answer that travels back as bytes."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any

from mcore.errors import McoreError

#: ("result", what the function returned, "") or ("error", the exception or None, its traceback).
Answer = tuple[str, Any, str]

#: How long the ranks beside one that failed may take to fail too.
GRACE_SECONDS = 2.0

#: How long ranks may take to start, or to come to the test that needs them.
START_SECONDS = 300.0


class WorkerError(McoreError, RuntimeError):
    """A rank failed; the message holds its traceback, or every rank's stack after a timeout."""


def pack_work(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A function and its arguments, as they are sent to every rank."""
    return pickle.dumps((fn, args))


def answer(work: bytes) -> bytes:
    """Do what was sent and pack the answer, which then keeps nothing alive that the work made."""
    try:
        fn, args = pickle.loads(work)
        return pickle.dumps(("result", fn(*args), ""))
    except Exception as error:  # noqa: BLE001  (whatever a test raises travels to who asked)
        return pack_error(error)


def pack_error(error: Exception) -> bytes:
    """The answer that says what was raised."""
    trace = "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps(("error", error, trace))
        pickle.loads(packed)
    except Exception:  # noqa: BLE001  (an exception that cannot travel is sent as text)
        return pickle.dumps(("error", None, trace))
    return packed


def raise_error(rank: int, failed: Answer) -> None:
    """Raise what a rank raised, with its traceback as the cause."""
    _, error, trace = failed
    cause = WorkerError(f"rank {rank}:\n{trace}")
    if isinstance(error, Exception):
        raise error from cause
    raise cause
