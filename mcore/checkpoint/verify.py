"""Whether a checkpoint on disk is what was written: every byte, every key. No process group."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcore.checkpoint.checksum import crc32
from mcore.checkpoint.commit import SHARD_PATTERN
from mcore.checkpoint.metadata import DTYPE_NAMES, CheckpointMetadata, ChunkRecord
from mcore.checkpoint.reader import read_metadata
from mcore.checkpoint.shard_file import why_not_opened
from mcore.errors import CheckpointError

_BLOCK_BYTES = 4 * 2**20
_MAX_HEADER_BYTES = 100 * 2**20


def verify(directory: Path) -> list[str]:
    """Everything that is wrong with the checkpoint in a directory; empty = it is good.

    The metadata has to be whole and to cover every key exactly once. Every file that it names has
    to have the recorded size, SHA-256 and safetensors header, and every box its CRC-32.

    Args:
        directory: of one iteration.
    """
    try:
        metadata = read_metadata(directory)
    except CheckpointError as error:
        return [str(error)]
    return [
        problem for name in metadata.files for problem in verify_file(directory, metadata, name)
    ]


def verify_file(directory: Path, metadata: CheckpointMetadata, name: str) -> list[str]:
    """What is wrong with one file of a checkpoint."""
    boxes = sorted(_boxes(metadata, name), key=lambda box: box[1].start)
    path = directory / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        return [f"cannot open {path}: {why_not_opened(error)}"]
    with os.fdopen(descriptor, "rb") as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size != metadata.files[name].nbytes:
                return [f"{path} has {size} bytes, {metadata.files[name].nbytes} were written"]
            _forget_cached(file.fileno())
            problems = _check_header(path, file.fileno(), boxes, metadata)
            return problems + _check_bytes(path, file, boxes, metadata)
        except OSError as error:
            return [f"cannot read {path}: {error.strerror}"]


def leftovers(directory: Path, metadata: CheckpointMetadata) -> list[str]:
    """Shards in the directory that belong to saves that died; harmless."""
    return sorted(
        entry.name for entry in directory.glob(SHARD_PATTERN) if entry.name not in metadata.files
    )


def _boxes(metadata: CheckpointMetadata, file: str) -> Iterator[tuple[str, ChunkRecord]]:
    for key, record in metadata.tensors.items():
        for chunk in record.chunks:
            if chunk.file == file:
                yield key, chunk


def _forget_cached(descriptor: int) -> None:
    """Ask for the bytes on the disk rather than those that the system still holds in memory."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _check_header(
    path: Path,
    descriptor: int,
    boxes: list[tuple[str, ChunkRecord]],
    metadata: CheckpointMetadata,
) -> list[str]:
    """The header of the file against the records of its boxes."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(_MAX_HEADER_BYTES, metadata.files[path.name].nbytes):
        return [f"{path} is damaged: its header claims {length} bytes"]
    try:
        header = json.loads(os.pread(descriptor, length, 8))
    except (ValueError, RecursionError):
        return [f"{path} is damaged: its header is not valid JSON"]
    if not isinstance(header, dict):
        return [f"{path} is damaged: its header is not a JSON object"]
    header.pop("__metadata__", None)
    wanted: dict[str, Any] = {
        chunk.name: {
            "dtype": DTYPE_NAMES[metadata.tensors[key].dtype],
            "shape": list(chunk.sizes),
            "data_offsets": [chunk.start - 8 - length, chunk.start - 8 - length + chunk.nbytes],
        }
        for key, chunk in boxes
    }
    return [
        f"{path} is damaged: its header and the metadata disagree about {name}"
        for name in sorted(wanted.keys() | header.keys())
        if wanted.get(name) != header.get(name)
    ]


def _check_bytes(
    path: Path,
    file: Any,
    boxes: list[tuple[str, ChunkRecord]],
    metadata: CheckpointMetadata,
) -> list[str]:
    """One pass over the file: its SHA-256, and the CRC-32 of each box."""
    digest, position, problems = hashlib.sha256(), 0, []
    for name, start, nbytes, wanted in [
        *((chunk.name, chunk.start, chunk.nbytes, chunk.crc32) for _, chunk in boxes),
        ("", metadata.files[path.name].nbytes, 0, 0),
    ]:
        for block in _blocks(file, start - position):  # between boxes: the header
            digest.update(block)
        crc = 0
        for block in _blocks(file, nbytes):
            digest.update(block)
            crc = crc32(block, crc)
        position = start + nbytes
        if name and crc != wanted:
            problems.append(f"{path} is damaged: the bytes of {name} do not fit their checksum")
    if not problems and digest.hexdigest() != metadata.files[path.name].sha256:
        problems.append(f"{path} is damaged: its SHA-256 is not the recorded one")
    return problems


def _blocks(file: Any, nbytes: int) -> Iterator[bytes]:
    while nbytes > 0:
        block = file.read(min(nbytes, _BLOCK_BYTES))
        if not block:
            return
        nbytes -= len(block)
        yield block
