"""The files of one checkpoint, read box by box and checked against their checksums."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from mcore.checkpoint.checksum import crc32
from mcore.checkpoint.metadata import ChunkRecord, FileRecord
from mcore.checkpoint.shard_file import byte_view, why_not_opened
from mcore.errors import DamagedCheckpointError

# Threads that read and check boxes while the caller copies the one before.
_READERS = 2
# What a thread reads and checks at a time: it is still in the processor's cache then.
_BLOCK_BYTES = 2**19


class ShardReader:
    """Reads boxes from the files of one checkpoint; each is checked against its CRC-32 as it comes.

    A few buffers, of a block and of the size of a box, are reused: memory does not depend on what
    is read.
    """

    def __init__(self, directory: Path, files: dict[str, FileRecord]) -> None:
        self._directory = directory
        self._files = files
        self._buffers = [
            torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(_READERS + 1)
        ]
        self._blocks: SimpleQueue[memoryview] = SimpleQueue()

    def check_sizes(self, chunks: Iterable[ChunkRecord]) -> None:
        """Look whether the files are as large as recorded, before memory is taken for them.

        Raises:
            DamagedCheckpointError: a file is absent or has another size.
        """
        for name in {chunk.file for chunk in chunks}:
            with self._open(name):
                pass

    def check(self, chunks: Iterable[ChunkRecord]) -> None:
        """Read boxes and check them; their bytes are not kept.

        Raises:
            DamagedCheckpointError: a file is absent, has another size or other bytes than recorded.
        """
        if self._blocks.empty():
            for _ in range(_READERS):
                self._blocks.put(memoryview(bytearray(_BLOCK_BYTES)))
        for name, of_file in _by_file(chunks):
            # The threads end first, then the file is closed.
            with self._open(name) as descriptor, ThreadPoolExecutor(_READERS) as executor:
                for _ in executor.map(partial(self._check, descriptor), of_file):
                    pass

    def _check(self, descriptor: int, chunk: ChunkRecord) -> None:
        block = self._blocks.get()
        try:
            crc = 0
            for start in range(0, chunk.nbytes, _BLOCK_BYTES):
                part = block[: chunk.nbytes - start]
                self._fill(descriptor, chunk, start, part)
                crc = crc32(part, crc)
            self._compare(chunk, crc)
        finally:
            self._blocks.put(block)

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
        with ThreadPoolExecutor(_READERS) as executor:
            for name, of_file in _by_file(chunks):
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
                f"cannot open {path}, a part of the checkpoint: {why_not_opened(error)}"
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
        crc = 0
        for start in range(0, chunk.nbytes, _BLOCK_BYTES):
            part = view[start : start + _BLOCK_BYTES]
            self._fill(descriptor, chunk, start, part)
            crc = crc32(part, crc)
        self._compare(chunk, crc)
        return data

    def _fill(self, descriptor: int, chunk: ChunkRecord, start: int, part: memoryview) -> None:
        """Read bytes of a box, from its `start`-th on."""
        path = self._directory / chunk.file
        done = 0
        while done < len(part):
            try:
                count = os.preadv(descriptor, [part[done:]], chunk.start + start + done)
            except OSError as error:
                raise DamagedCheckpointError(f"cannot read {path}: {error.strerror}") from error
            if count == 0:
                raise DamagedCheckpointError(f"{path} is damaged: it ends inside {chunk.name}")
            done += count

    def _compare(self, chunk: ChunkRecord, crc: int) -> None:
        if crc != chunk.crc32:
            raise DamagedCheckpointError(
                f"{self._directory / chunk.file} is damaged: the bytes of {chunk.name} do not fit "
                "their checksum"
            )


def _by_file(chunks: Iterable[ChunkRecord]) -> Iterator[tuple[str, Iterator[ChunkRecord]]]:
    ordered = sorted(chunks, key=lambda chunk: (chunk.file, chunk.start))
    return itertools.groupby(ordered, key=lambda chunk: chunk.file)
