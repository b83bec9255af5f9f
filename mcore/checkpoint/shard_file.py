"""One safetensors file: written in a stream, with checksums.

The layout is that of safetensors: 8 bytes length of the header (little-endian), the header in JSON
with name, type, shape and byte range of each tensor, then the bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.checkpoint.checksum import crc32
from mcore.checkpoint.metadata import DTYPE_NAMES, ChunkRecord, FileRecord

# Bytes that wait for the hashing thread; bounds the host memory that a save from a GPU takes.
_IN_FLIGHT_BYTES = 64 * 2**20
# The disk is told to begin with so many bytes, not only at the end with all of them.
_FLUSH_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class ShardItem:
    """A box to be written.

    Attributes:
        name: in the file.
        offsets, sizes, dtype: the box.
        fetch: gives its elements, on any device; called when its turn comes.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.sizes) * self.dtype.itemsize


def write_shard(
    path: Path, items: Sequence[ShardItem], remarks: Mapping[str, str] | None = None
) -> tuple[FileRecord, list[ChunkRecord]]:
    """Write a new file and make it durable.

    Args:
        path: must not exist.
        items: boxes, in the order of the file; wide types first keep all of them aligned.
        remarks: further members of the header's `__metadata__`.

    Returns:
        The record of the file and those of its boxes, in the order of `items`.

    Raises:
        OSError: the disk is full, or the like; the unfinished file is deleted, one that is in the
            way is not.
    """
    try:
        return _write(path, items, _header(items, remarks or {}))
    except FileExistsError:  # somebody else's
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(
    path: Path, items: Sequence[ShardItem], header: bytes
) -> tuple[FileRecord, list[ChunkRecord]]:
    records: list[ChunkRecord] = []
    start = len(header)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with (
        os.fdopen(os.open(path, flags, 0o666), "wb", buffering=1 << 20) as file,
        _Digest(header) as digest,
        _Flusher(file.fileno()) as flusher,
    ):
        file.write(header)
        for item in items:
            data = _host_bytes(item)
            digest.update(data)
            place = (path.name, item.name, start, item.nbytes)
            records.append(ChunkRecord(item.offsets, item.sizes, *place, crc32(data)))
            file.write(data)
            flusher.wrote(item.nbytes)
            start += item.nbytes
        file.flush()
        flusher.finish()
        return FileRecord(start, digest.finish()), records


class _Digest:
    """SHA-256 of what is written, computed beside the writing: hashlib frees the GIL."""

    def __init__(self, header: bytes) -> None:
        self._digest = hashlib.sha256(header)
        self._pending: deque[tuple[int, Future[None]]] = deque()
        self._waiting = 0
        self._thread = ThreadPoolExecutor(1)  # one, so in order

    def __enter__(self) -> _Digest:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def update(self, data: memoryview) -> None:
        """Take the next bytes; waits where too many are under way."""
        self._pending.append((len(data), self._thread.submit(self._digest.update, data)))
        self._waiting += len(data)
        while self._waiting > _IN_FLIGHT_BYTES:
            self._settle()

    def finish(self) -> str:
        """The digest, in hexadecimal."""
        while self._pending:
            self._settle()
        return self._digest.hexdigest()

    def _settle(self) -> None:
        nbytes, future = self._pending.popleft()
        future.result()
        self._waiting -= nbytes


class _Flusher:
    """Has a file flushed to the disk beside the writing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unflushed = 0
        self._flush: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def wrote(self, nbytes: int) -> None:
        """So many more bytes are on their way."""
        self._unflushed += nbytes
        if self._unflushed < _FLUSH_BYTES or not (self._flush is None or self._flush.done()):
            return
        self._settle()
        self._flush = self._thread.submit(os.fsync, self._descriptor)
        self._unflushed = 0

    def finish(self) -> None:
        """Wait until all that was written is on the disk."""
        self._settle()
        os.fsync(self._descriptor)

    def _settle(self) -> None:
        if self._flush is not None:
            self._flush.result()


def _header(items: Iterable[ShardItem], remarks: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **remarks}}
    position = 0
    for item in items:
        assert item.name not in entries
        entries[item.name] = {
            "dtype": DTYPE_NAMES[item.dtype],
            "shape": item.sizes,
            "data_offsets": [position, position + item.nbytes],
        }
        position += item.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _host_bytes(item: ShardItem) -> memoryview:
    tensor = item.fetch()
    assert tuple(tensor.shape) == item.sizes
    assert tensor.dtype == item.dtype
    return byte_view(tensor.detach().to("cpu").contiguous())


def byte_view(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def why_not_opened(error: OSError) -> str | None:
    """In words why a file of a checkpoint, opened with O_NOFOLLOW, could not be opened."""
    if error.errno == errno.ELOOP:
        return "it is a link; a checkpoint's files must be regular files"
    return error.strerror
