"""Ranks that do something together and fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mcore.errors import CheckpointError, DamagedCheckpointError, McoreError
from mcore.topology.group import Group

T = TypeVar("T")

# What a user, a file, a disk or the network can cause. Anything else is a bug and travels as it is.
_FORESEEN = (McoreError, OSError)


def process_group(group: Group | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The torch group to work in; None = torch.distributed is not in use.

    Args:
        group: as the caller gave it; None = all ranks of the job.
    """
    if isinstance(group, Group):
        return group.handle
    if group is None and dist.is_initialized():
        return dist.group.WORLD
    return group


def rank_in(group: dist.ProcessGroup | None) -> int:
    """This process's position in the group."""
    return 0 if group is None else dist.get_rank(group)


def run_together(group: dist.ProcessGroup | None, action: Callable[[], T]) -> list[T]:
    """Run an action on every rank of a group; an error on one is an error on all.

    Args:
        group: ranks, all of which call this; None = this process alone.
        action: anything local; its result has to be picklable.

    Returns:
        The results in group order.

    Comm: one all-gather of the pickled results.

    Raises:
        CheckpointError: the action failed somewhere; the message names the ranks. It is a
            `DamagedCheckpointError` where some rank saw damage.
    """
    result: T | None = None
    failure: tuple[bool, str] | None = None
    try:
        result = action()
    except _FORESEEN as error:
        if group is None:
            raise as_checkpoint_error(error) from error
        failure = (isinstance(error, DamagedCheckpointError), describe(error))
    if group is None:
        return [result]  # type: ignore[list-item]
    gathered: list[tuple[T, tuple[bool, str] | None]] = [None] * dist.get_world_size(group)  # type: ignore[list-item]
    dist.all_gather_object(gathered, (result, failure), group=group)
    failures = {rank: failed for rank, (_, failed) in enumerate(gathered) if failed is not None}
    if failures:
        damaged = any(is_damage for is_damage, _ in failures.values())
        kind = DamagedCheckpointError if damaged else CheckpointError
        raise kind(_join({rank: text for rank, (_, text) in failures.items()}))
    return [value for value, _ in gathered]


def describe(error: BaseException) -> str:
    """An error in one line: the message alone where it is one of ours."""
    if isinstance(error, McoreError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def as_checkpoint_error(error: BaseException) -> CheckpointError:
    """The same failure as a `CheckpointError`; failures of several ranks become one message."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, CheckpointException):
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        damaged = any(isinstance(cause, DamagedCheckpointError) for cause in causes.values())
        kind = DamagedCheckpointError if damaged else CheckpointError
        return kind(_join({rank: describe(cause) for rank, cause in causes.items()}))
    return CheckpointError(describe(error))


def _join(failures: dict[int, str]) -> str:
    """Messages by rank; ranks with the same message share a line."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items())
