"""Our storage behind `torch.distributed.checkpoint`: safetensors shards and JSON, no pickle.

Every rank writes at most one shard. The coordinator then publishes the metadata.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mcore.checkpoint.metadata import (
    CheckpointMetadata,
    ChunkRecord,
    FileRecord,
    TensorRecord,
)
from mcore.checkpoint.shard_file import ShardItem, write_shard
from mcore.checkpoint.shard_reader import ShardReader

Publish = Callable[[dict[str, TensorRecord], dict[str, FileRecord]], None]


@dataclass(frozen=True, slots=True)
class _Written:
    """What a rank tells the coordinator about a box that it wrote."""

    chunk: ChunkRecord
    file: FileRecord


class ShardWriter(StorageWriter):
    """Writes this rank's boxes into one safetensors file.

    Args:
        path: the file to write; it must not exist.
        publish: called on the coordinator once all ranks have written, with the records of all
            tensors and files.
    """

    def __init__(self, path: Path, publish: Publish) -> None:
        self._path = path
        self._publish = publish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: an instance serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan gives this rank; a rank without work writes no file."""
        pairs = [(write, _shard_item(write, planner)) for write in plan.items]
        pairs.sort(key=lambda pair: -pair[1].dtype.itemsize)
        results: list[WriteResult] = []
        if pairs:
            file, chunks = write_shard(self._path, [item for _, item in pairs])
            results = [
                WriteResult(write.index, chunk.nbytes, _Written(chunk, file))
                for (write, _), chunk in zip(pairs, chunks, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Gather the records of all ranks and publish them (coordinator only)."""
        written = [result for of_rank in results for result in of_rank]
        chunks: dict[str, list[ChunkRecord]] = {}
        files: dict[str, FileRecord] = {}
        for result in written:
            chunks.setdefault(result.index.fqn, []).append(result.storage_data.chunk)
            files[result.storage_data.chunk.file] = result.storage_data.file
        tensors = {
            key: TensorRecord(
                tuple(value.size),
                value.properties.dtype,
                tuple(sorted(chunks[key], key=lambda chunk: chunk.offsets)),
            )
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        self._publish(tensors, files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Never picked by name."""
        return False


def _shard_item(write: WriteItem, planner: SavePlanner) -> ShardItem:
    data = write.tensor_data
    assert data is not None
    offsets = tuple(data.chunk.offsets)

    def fetch() -> torch.Tensor:
        tensor = planner.resolve_data(write)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    return ShardItem(
        name=f"{write.index.fqn}@{','.join(map(str, offsets))}",
        offsets=offsets,
        sizes=tuple(data.chunk.sizes),
        dtype=data.properties.dtype,
        fetch=fetch,
    )


class ShardLoader(StorageReader):
    """Reads the boxes that a plan needs.

    All of them are read and checked while the ranks still plan, where an error on one stops all;
    only then does the first element change. The second reading comes from the system's cache.

    Args:
        directory: of the checkpoint.
        metadata: its checked metadata.
    """

    def __init__(self, directory: Path, metadata: CheckpointMetadata) -> None:
        self._metadata = metadata
        self._reader = ShardReader(directory, metadata.files)
        self._chunks = {
            MetadataIndex(key, chunk.offsets): chunk
            for key, record in metadata.tensors.items()
            for chunk in record.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: an instance serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """What the checkpoint holds, in the planners' terms."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    properties=TensorProperties(dtype=record.dtype),
                    size=torch.Size(record.shape),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in record.chunks
                    ],
                )
                for key, record in self._metadata.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check every byte that this rank is about to load."""
        self._reader.check(self._by_chunk(plan))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring the boxes into place, one at a time."""
        items = self._by_chunk(plan)
        direct = {
            chunk: place
            for chunk, wanted in items.items()
            if (place := self._place(chunk, wanted, planner)) is not None
        }
        for chunk, data in self._reader.read(items, direct):
            for item in () if chunk in direct else items[chunk]:
                dtype = self._metadata.tensors[item.storage_index.fqn].dtype
                box = data.view(dtype).view(chunk.sizes)
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    box = box.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(box)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _place(
        self, chunk: ChunkRecord, items: list[ReadItem], planner: LoadPlanner
    ) -> torch.Tensor | None:
        """Memory that is wanted to hold just the bytes of a box; None where they must be copied."""
        if len(items) != 1 or tuple(items[0].lengths) != chunk.sizes:
            return None
        target = planner.resolve_tensor(items[0]).detach()
        dtype = self._metadata.tensors[items[0].storage_index.fqn].dtype
        fits = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
        return target.reshape(-1).view(torch.uint8) if fits and target.numel() else None

    def _by_chunk(self, plan: LoadPlan) -> dict[ChunkRecord, list[ReadItem]]:
        items: dict[ChunkRecord, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self._chunks[item.storage_index], []).append(item)
        return items

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """Never picked by name."""
        return False
