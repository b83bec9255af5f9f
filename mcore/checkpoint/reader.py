"""Reading a checkpoint whole, in one process: for conversion, generation and tools."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.checkpoint.commit import METADATA_NAME, find_checkpoint
from mcore.checkpoint.metadata import CheckpointMetadata, decode_metadata
from mcore.checkpoint.shard_reader import ShardReader
from mcore.checkpoint.together import process_group, run_together
from mcore.errors import CheckpointError, DamagedCheckpointError
from mcore.topology.group import Group


def read_metadata(directory: Path) -> CheckpointMetadata:
    """The checked metadata of the checkpoint in a directory.

    Raises:
        DamagedCheckpointError: it is absent or damaged.
        CheckpointError: it is of another format version.
    """
    path = directory / METADATA_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
    return decode_metadata(data, str(path))


class CheckpointReader:
    """A complete checkpoint, opened for reading; no process group is involved.

    Args:
        path: save root, or the directory of one iteration.
        iteration: which one; None = the one that the pointer names.

    Attributes:
        directory: where it lies.
        metadata: all but the numbers.

    Raises:
        CheckpointError: no such checkpoint, or its metadata is damaged.
    """

    def __init__(self, path: str | os.PathLike[str], iteration: int | None = None) -> None:
        self.directory = find_checkpoint(path, iteration)
        self.metadata = read_metadata(self.directory)
        self._reader = ShardReader(self.directory, self.metadata.files)

    @property
    def common(self) -> dict[str, Any]:
        """JSON state."""
        return self.metadata.common

    def keys(self) -> list[str]:
        """Keys of all tensors, sorted."""
        return sorted(self.metadata.tensors)

    def tensor(self, key: str) -> Tensor:
        """A whole tensor on the CPU.

        Raises:
            CheckpointError: no such key, or its bytes are damaged.
        """
        record = self.metadata.tensors.get(key)
        if record is None:
            raise CheckpointError(f"{self.directory} holds no tensor {key}")
        self._reader.check_sizes(record.chunks)
        tensor = torch.empty(record.shape, dtype=record.dtype, device="cpu")
        for chunk, data in self._reader.read(record.chunks):
            target = tensor
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, start, size)
            target.copy_(data.view(record.dtype).view(chunk.sizes))
        return tensor


def read_common(path: str | os.PathLike[str], iteration: int | None = None) -> dict[str, Any]:
    """The JSON state of a checkpoint; arguments and errors as those of `CheckpointReader`."""
    return CheckpointReader(path, iteration).common


def read_common_together(
    path: str | os.PathLike[str], group: Group | dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """The JSON state of a checkpoint, as its first rank reads it. Collective.

    Args:
        path: save root, or the directory of one iteration.
        group: ranks that read together; None = all ranks of the job, or this process alone.

    Comm: one gather over the group.

    Raises:
        CheckpointError: on every rank, when it fails on one.
    """
    return run_together(process_group(group), lambda: read_common(path))[0]


def read_tensors(
    path: str | os.PathLike[str], keys: Collection[str] | None = None, iteration: int | None = None
) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint by key, on the CPU.

    Args:
        path: save root, or the directory of one iteration.
        keys: which; None = all.
        iteration: which one; None = the one that the pointer names.

    Raises:
        CheckpointError: no such checkpoint or key, or damage.
    """
    reader = CheckpointReader(path, iteration)
    return {key: reader.tensor(key) for key in (reader.keys() if keys is None else keys)}
