"""Which checkpoint a run starts from when the newest one is damaged or was never finished."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from mcore.checkpoint.commit import (
    POINTER_NAME,
    complete_iterations,
    find_checkpoint,
    iteration_directory,
    latest_iteration,
    unfinished_iterations,
)
from mcore.checkpoint.together import process_group, rank_in, run_together
from mcore.errors import DamagedCheckpointError
from mcore.log import get_logger
from mcore.topology.group import Group

T = TypeVar("T")


def candidates(
    path: str | os.PathLike[str], iteration: int | None = None
) -> tuple[list[Path], list[str]]:
    """Checkpoints to try, the best one first, and what is odd about the save root, in words.

    Where the pointer decides, the complete checkpoints before the one that it names follow. A newer
    one than it names is none of them: somebody may have set the pointer back. Without a readable
    pointer all complete ones are tried.

    Args:
        path: a save root, or the directory of one iteration.
        iteration: the only one to try; None = the pointer decides.

    Raises:
        CheckpointError: there is nothing to try.
    """
    root = Path(path)
    if iteration is not None or (root / "metadata.json").is_file():
        return [find_checkpoint(path, iteration)], []
    remarks: list[str] = []
    pointer = None
    try:
        pointer = latest_iteration(root)
        lost = pointer is None and bool(complete_iterations(root))
        found = [] if lost else [find_checkpoint(root)]
        remarks += [f"{root} has no {POINTER_NAME}"] if lost else []
    except DamagedCheckpointError as error:
        found = []
        remarks.append(str(error))
    older = [n for n in reversed(complete_iterations(root)) if pointer is None or n < pointer]
    found += [iteration_directory(root, n) for n in older]
    if not found:
        raise DamagedCheckpointError("; ".join(remarks))
    for number in unfinished_iterations(root):
        if pointer is not None and number > pointer:
            remarks.append(f"iteration {number} in {root} was never finished and is not used")
    return found, remarks


def first_good(
    path: str | os.PathLike[str],
    attempt: Callable[[Path], T],
    *,
    iteration: int | None = None,
    fall_back: bool = True,
    on_damage: Callable[[Path], None] | None = None,
    group: Group | dist.ProcessGroup | None = None,
) -> T:
    """Use the newest checkpoint that is not damaged. Collective.

    Args:
        path: a save root, or the directory of one iteration.
        attempt: what is done with the directory of a checkpoint; collective. If it raises
            `DamagedCheckpointError`, then on every rank and before anything has changed.
        iteration: the only one to try; None = the pointer decides.
        fall_back: go on to the one before a damaged one; otherwise damage is an error.
        on_damage: is told the directory of each that is passed over.
        group: ranks that do so together; None = all ranks of the job, or this process alone.

    Returns:
        What `attempt` returned.

    Comm: gathers over the group.

    Raises:
        CheckpointError: nothing to try, no good one, or whatever else `attempt` raises.
    """
    handle = process_group(group)
    if not fall_back:
        found = [run_together(handle, lambda: find_checkpoint(path, iteration))[0]]
        remarks: list[str] = []
    else:
        found, remarks = run_together(handle, lambda: candidates(path, iteration))[0]
    tells = rank_in(handle) == 0  # the others know the same
    for remark in remarks if tells else ():
        get_logger().warning("%s", remark)
    for directory, following in zip(found, [*found[1:], None], strict=True):
        try:
            return attempt(directory)
        except DamagedCheckpointError as error:
            if following is None and directory is found[0]:
                raise
            if following is None:
                raise DamagedCheckpointError(
                    f"{error}; it was the last of {len(found)}, and none of {path} can be used: "
                    "bring one of them back from a copy, or start a new run in another --save"
                ) from error
            if on_damage is not None:
                on_damage(directory)
            if tells:
                get_logger().error(
                    "the checkpoint %s is damaged and is not used: %s; GOING BACK to %s",
                    directory,
                    error,
                    following,
                )
    raise AssertionError
