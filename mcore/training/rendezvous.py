"""Meeting the other ranks of this start of the job, not those of an earlier one.

torchrun keeps one store over its restarts. Addresses that the workers of an earlier start left
there would be taken for those of the present ones, which would wait for the dead until the timeout.
torchrun's own count of restarts does not tell them apart: each machine counts for itself.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Protocol

from mcore.errors import LostPeerError

_POLL_SECONDS = 0.05


class Store(Protocol):
    """What is used of torch's store; `get` waits for the key."""

    def set(self, key: str, value: str) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """A value, once it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """A name for this start of the job, which no earlier start knew; the same on all ranks.

    Rank 0 makes it up and says who answered; a rank that is not among them has read the name of an
    earlier start, and reads again.

    Args:
        store: the launcher's.
        rank: of this process.
        size: ranks of the job.
        timeout: how long rank 0 may take; the store's own bounds the waiting for a key.

    Raises:
        LostPeerError: rank 0 of this start did not come.
    """
    own = uuid.uuid4().hex
    if rank == 0:
        store.set("mcore/start", own)
        answers = [store.get(f"mcore/{own}/{other}").decode() for other in range(1, size)]
        store.set(f"mcore/{own}/all", " ".join(answers))
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        name = store.get("mcore/start").decode()
        store.set(f"mcore/{name}/{rank}", own)
        complete = f"mcore/{name}/all"
        if store.check([complete]) and own in store.get(complete).decode().split():
            return name
        time.sleep(_POLL_SECONDS)
    raise LostPeerError(
        f"rank {rank} waited {timeout} for rank 0 of this start of the job, which did not come; "
        "see its node's log, or give more --distributed-timeout-minutes"
    )
