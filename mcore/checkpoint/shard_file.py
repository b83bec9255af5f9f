"""One safetensors file: written and read in a stream, with checksums.

The layout is that of safetensors: 8 bytes length of the header (little-endian), the header in JSON
with name, type, shape and byte range of each tensor, then the bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.checkpoint.metadata import DTYPE_NAMES, ChunkRecord, FileRecord
from mcore.errors import DamagedCheckpointError

# Chunks that wait for the hashing thread; bounds the host memory that a save from a GPU takes.
_IN_FLIGHT = 4
# Threads that read and check boxes while the caller copies the one before.
_READERS = 2


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
        OSError: the disk is full, or the like; the unfinished file is deleted.
    """
    try:
        return _write(path, items, _header(items, remarks or {}))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _write(
    path: Path, items: Sequence[ShardItem], header: bytes
) -> tuple[FileRecord, list[ChunkRecord]]:
    digest = hashlib.sha256(header)
    sums: deque[Future[int]] = deque()
    checksums: list[int] = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

    def hash_bytes(data: memoryview) -> int:
        digest.update(data)
        return zlib.crc32(data)

    with (
        os.fdopen(os.open(path, flags, 0o666), "wb", buffering=1 << 20) as file,
        ThreadPoolExecutor(1) as hasher,
        ThreadPoolExecutor(1) as flusher,
    ):
        file.write(header)
        flush = flusher.submit(os.fsync, file.fileno())
        for item in items:
            data = _host_bytes(item)
            # One thread, so in order; it runs beside the write: hashlib and zlib free the GIL.
            sums.append(hasher.submit(hash_bytes, data))
            file.write(data)
            if flush.done():  # keep the disk busy from the start, not only at the end
                flush.result()
                flush = flusher.submit(os.fsync, file.fileno())
            while len(sums) > _IN_FLIGHT:
                checksums.append(sums.popleft().result())
        file.flush()
        flush.result()
        os.fsync(file.fileno())
        checksums += [future.result() for future in sums]
    records, start = [], len(header)
    for item, crc in zip(items, checksums, strict=True):
        place = (path.name, item.name, start, item.nbytes)
        records.append(ChunkRecord(item.offsets, item.sizes, *place, crc))
        start += item.nbytes
    return FileRecord(start, digest.hexdigest()), records


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


class ShardReader:
    """Reads boxes from the files of one checkpoint; each is checked against its CRC-32 as it comes.

    A few buffers of the size of a box are reused: memory does not depend on what is read.
    """

    def __init__(self, directory: Path, files: dict[str, FileRecord]) -> None:
        self._directory = directory
        self._files = files
        self._buffers = [
            torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(_READERS + 1)
        ]

    def check_sizes(self, chunks: Iterable[ChunkRecord]) -> None:
        """Look whether the files are as large as recorded, before memory is taken for them.

        Raises:
            DamagedCheckpointError: a file is absent or has another size.
        """
        for name in {chunk.file for chunk in chunks}:
            with self._open(name):
                pass

    def read(
        self, chunks: Iterable[ChunkRecord], targets: Mapping[ChunkRecord, Tensor] | None = None
    ) -> Iterator[tuple[ChunkRecord, Tensor]]:
        """Read boxes, file by file.

        Args:
            chunks: which.
            targets: where the bytes of some of them are to come to lie: 1-D uint8 tensors.

        Yields:
            Each box with its bytes, a 1-D uint8 tensor: its target, or a buffer that is valid until
            the next box is asked for.

        Raises:
            DamagedCheckpointError: a file is absent, has another size or other bytes than recorded.
        """
        targets = targets or {}
        ordered = sorted(chunks, key=lambda chunk: (chunk.file, chunk.start))
        with ThreadPoolExecutor(_READERS) as executor:
            for name, of_file in itertools.groupby(ordered, key=lambda chunk: chunk.file):
                with self._open(name) as descriptor:
                    pairs = [(chunk, targets.get(chunk)) for chunk in of_file]
                    yield from self._read_ahead(executor, descriptor, pairs)

    def _read_ahead(
        self,
        executor: ThreadPoolExecutor,
        descriptor: int,
        pairs: list[tuple[ChunkRecord, Tensor | None]],
    ) -> Iterator[tuple[ChunkRecord, Tensor]]:
        pending: deque[tuple[ChunkRecord, Future[Tensor]]] = deque()
        try:
            for i, (chunk, target) in enumerate(pairs):
                slot = i % len(self._buffers)
                future = executor.submit(self._fetch, descriptor, chunk, slot, target)
                pending.append((chunk, future))
                if len(pending) == len(self._buffers):
                    done, first = pending.popleft()
                    yield done, first.result()
            for done, future in pending:
                yield done, future.result()
        finally:
            wait([future for _, future in pending])  # the descriptor is about to be closed

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        path = self._directory / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise DamagedCheckpointError(
                f"cannot open {path}, a part of the checkpoint: {error.strerror}"
            ) from error
        try:
            found, wanted = os.fstat(descriptor).st_size, self._files[name].nbytes
            if found != wanted:
                raise DamagedCheckpointError(
                    f"{path} is damaged: it has {found} bytes, {wanted} were written"
                )
            yield descriptor
        finally:
            os.close(descriptor)

    def _fetch(
        self, descriptor: int, chunk: ChunkRecord, slot: int, target: Tensor | None
    ) -> Tensor:
        if target is None:
            if self._buffers[slot].numel() < chunk.nbytes:
                self._buffers[slot] = torch.empty(chunk.nbytes, dtype=torch.uint8, device="cpu")
            target = self._buffers[slot]
        data = target[: chunk.nbytes]
        view = byte_view(data)
        path = self._directory / chunk.file
        done = 0
        while done < chunk.nbytes:
            try:
                count = os.preadv(descriptor, [view[done:]], chunk.start + done)
            except OSError as error:
                raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
            if count == 0:
                raise DamagedCheckpointError(f"{path} is damaged: it ends inside {chunk.name}")
            done += count
        if zlib.crc32(view) != chunk.crc32:
            raise DamagedCheckpointError(
                f"{path} is damaged: the bytes of {chunk.name} do not fit their checksum"
            )
        return data
