"""Saving a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mcore.checkpoint.commit import (
    delete_leftovers,
    discard,
    is_foreign,
    iteration_directory,
    latest_iteration,
    make_directory,
    point_to,
    publish,
)
from mcore.checkpoint.metadata import (
    DTYPE_NAMES,
    CheckpointMetadata,
    FileRecord,
    TensorRecord,
    encode_metadata,
    versions,
)
from mcore.checkpoint.planner import SavePlanner
from mcore.checkpoint.rank_local import RankLocal, is_rank_local
from mcore.checkpoint.sharded_tensor import ShardedTensor, whole_tensor
from mcore.checkpoint.storage import ShardWriter
from mcore.checkpoint.together import as_checkpoint_error, process_group, rank_in, run_together
from mcore.errors import CheckpointError
from mcore.topology.group import Group


def save(
    root: str | os.PathLike[str],
    iteration: int,
    tensors: Mapping[str, ShardedTensor | Tensor],
    common: Mapping[str, Any],
    *,
    rank_local: RankLocal | None = None,
    group: Group | dist.ProcessGroup | None = None,
    settle: bool = True,
) -> Path:
    """Write the checkpoint of an iteration and let the pointer name it. Collective.

    Until the very end nothing of an earlier checkpoint changes, not even when the same iteration is
    written again.

    Args:
        root: save root, on a file system that all ranks share; made if absent.
        iteration: number of finished training iterations.
        tensors: what this rank holds, by layout-free key. A plain tensor is held whole by every
            rank that has it, and one of them writes it.
        common: JSON state, the same on all ranks; the first rank's is stored.
        rank_local: state of this rank alone, given by all ranks or by none.
        group: ranks that save together; None = all ranks of the job, or this process alone where
            torch.distributed is not initialised.
        settle: delete what was there of this iteration before; False leaves it to an `Aftercare`,
            which can go back to it.

    Returns:
        Directory of the iteration.

    Comm: gathers, scatters and broadcasts of plans and records over the group.

    Raises:
        CheckpointError: on every rank, when it fails on one: what cannot be stored, elements that
            no rank or two ranks hold, a directory with another program's checkpoint, a full or
            vanished disk.
    """
    handle = process_group(group)
    directory = iteration_directory(root, iteration)
    state: dict[str, ShardedTensor] = {}

    def prepare() -> str:
        state.update(_checked_state(tensors, common, rank_local))
        if rank_in(handle) == 0:
            if is_foreign(directory):
                raise CheckpointError(
                    f"{directory} holds a checkpoint of another program; move it away or save to "
                    "another directory"
                )
            make_directory(directory)
        return secrets.token_hex(4)

    try:
        token = run_together(handle, prepare)[0]
    except CheckpointError as error:
        raise _not_saved(directory, error) from error

    def finish(records: dict[str, TensorRecord], files: dict[str, FileRecord]) -> None:
        layout = None if rank_local is None else dict(rank_local.layout)
        metadata = CheckpointMetadata(iteration, dict(common), layout, records, files, versions())
        publish(directory, encode_metadata(metadata))
        point_to(Path(root), iteration)
        if settle:
            delete_leftovers(directory, files)

    path = directory / f"shard_{rank_in(handle):05d}.{token}.safetensors"
    try:
        _dcp_save(state, ShardWriter(path, finish), handle)
    except CheckpointException as error:
        discard(path)
        raise _not_saved(directory, as_checkpoint_error(error)) from error
    return directory


def _not_saved(directory: Path, why: CheckpointError) -> CheckpointError:
    """The same failure with what it means."""
    left = "no checkpoint is complete there yet"
    with contextlib.suppress(CheckpointError):
        newest = latest_iteration(directory.parent)
        left = left if newest is None else f"that of iteration {newest} is still the newest"
    return type(why)(f"the checkpoint {directory} could not be saved: {why}; {left}")


def _dcp_save(
    state: dict[str, ShardedTensor], writer: ShardWriter, group: dist.ProcessGroup | None
) -> None:
    planner = SavePlanner()
    if group is not None:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def _checked_state(
    tensors: Mapping[str, ShardedTensor | Tensor],
    common: Mapping[str, Any],
    rank_local: RankLocal | None,
) -> dict[str, ShardedTensor]:
    """Everything that this rank stores, by key, checked before the first byte is written."""
    _check_json("common", common)
    state = {key: as_sharded(key, value) for key, value in tensors.items()}
    for key in state:
        if is_rank_local(key):
            raise CheckpointError(f"the key {key} looks like state of one rank: use `rank_local`")
    if rank_local is not None:
        _check_json("rank_local.layout", rank_local.layout)
        for name, tensor in rank_local.tensors.items():
            state[rank_local.key(name)] = whole_tensor(rank_local.key(name), tensor)
    for key, value in state.items():
        if value.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{key} is {value.dtype}, which safetensors cannot hold; convert it to one of "
                f"{', '.join(map(str, DTYPE_NAMES))}"
            )
    return state


def as_sharded(key: str, value: ShardedTensor | Tensor) -> ShardedTensor:
    """The value as a `ShardedTensor` of that key.

    Raises:
        CheckpointError: it belongs under another key.
    """
    if isinstance(value, Tensor):
        return whole_tensor(key, value)
    if value.key != key:
        raise CheckpointError(f"the tensor under {key} says that its key is {value.key}")
    return value


def _check_json(what: str, value: Mapping[str, Any]) -> None:
    try:
        restored = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be stored as JSON: {error}") from error
    if restored != _lists(dict(value)):
        raise CheckpointError(
            f"{what} changes when it is stored as JSON: use text as keys throughout"
        )


def _lists(value: Any) -> Any:
    """The value with tuples as lists, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return value
