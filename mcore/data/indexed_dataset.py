"""Reader of an indexed dataset, `PREFIX.bin` and `PREFIX.idx` (see `indexed_format`)."""

from __future__ import annotations

import bisect
import dataclasses
import os

import numpy as np

from mcore.data.indexed_format import (
    HEADER,
    LENGTH_DTYPE,
    MAGIC,
    POINTER_DTYPE,
    VERSION,
    DType,
    get_bin_path,
    get_idx_path,
)
from mcore.errors import DataError

_CHECK_ROWS = 1 << 20  # index rows looked at together: the checks need no memory that grows


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    dtype: np.dtype
    num_sequences: int
    num_boundaries: int


class IndexedDataset:
    """Sequences of token ids in a pair of files, read in place.

    Every claim of the index is checked against the file sizes before anything is allocated, so that
    a truncated or hostile file raises `DataError` and nothing else. Reading is thread-safe.

    Args:
        path_prefix: the two files' common name, without `.bin` and `.idx`.
        mmap: map `.bin` into memory; False reads each sequence through a file descriptor.

    Raises:
        DataError: a file that is absent, truncated or not an index; the message names it.
    """

    def __init__(self, path_prefix: str, *, mmap: bool = True) -> None:
        self.path_prefix = path_prefix
        idx_path, bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        _require_files(path_prefix, idx_path, bin_path)
        header = _read_header(idx_path)
        index = _map(idx_path)
        self.dtype = header.dtype
        sequences = header.num_sequences
        pointers_at = HEADER.size + LENGTH_DTYPE.itemsize * sequences
        boundaries_at = pointers_at + POINTER_DTYPE.itemsize * sequences
        self.sequence_lengths = np.frombuffer(index, LENGTH_DTYPE, sequences, HEADER.size)
        self.sequence_pointers = np.frombuffer(index, POINTER_DTYPE, sequences, pointers_at)
        self.document_indices = np.frombuffer(
            index, POINTER_DTYPE, header.num_boundaries, boundaries_at
        )
        self.num_tokens = _check_index(self, idx_path)
        _check_bin_size(bin_path, self.num_tokens * self.dtype.itemsize, idx_path)
        self._tokens: np.ndarray | None = None
        self._file: _TokenFile | None = None
        if mmap:
            self._tokens = np.frombuffer(_map(bin_path), self.dtype)
        else:
            self._file = _TokenFile(bin_path, self.dtype)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        """All tokens of a sequence, [length]; read-only where the file is mapped."""
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Part of a sequence.

        Args:
            index: which sequence, 0 <= index < len(self).
            offset: first token wanted.
            length: number of tokens; None = to the end.

        Returns:
            [length] in the file's type, not to be written to.

        Raises:
            IndexError: outside the sequence, or no such sequence.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.path_prefix}, which has {len(self)}")
        available = int(self.sequence_lengths[index])
        count = available - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > available:
            raise IndexError(
                f"tokens [{offset}, {offset + count}) of sequence {index} of {self.path_prefix}, "
                f"which has {available}"
            )
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize + offset
        return self._read(start, count)

    def place_in_document(self, sequence: int) -> tuple[int, int]:
        """The document that a sequence belongs to, and how many of its tokens come before it."""
        # By single reads: numpy would copy all boundaries, which lie unaligned in the file.
        document = bisect.bisect_right(self.document_indices, sequence) - 1
        first = int(self.document_indices[document])
        before = int(self.sequence_pointers[sequence]) - int(self.sequence_pointers[first])
        return document, before // self.dtype.itemsize

    def gather(
        self, sequences: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, out: np.ndarray
    ) -> int:
        """Lay parts of sequences end to end: `get` for many, without its cost per call.

        Args:
            sequences: which ones, int64 [parts].
            offsets: first token wanted of each, [parts].
            lengths: number of tokens of each, inside its sequence, [parts].
            out: where the tokens go, [at least sum(lengths)].

        Returns:
            The number of tokens written.
        """
        starts = self.sequence_pointers[sequences] // self.dtype.itemsize + offsets
        end = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            out[end : end + length] = self._read(start, length)
            end += length
        return end

    def _read(self, start: int, count: int) -> np.ndarray:
        if self._tokens is not None:
            return self._tokens[start : start + count]
        assert self._file is not None
        return self._file.read(start, count)

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Both files are there."""
        return os.path.isfile(get_idx_path(path_prefix)) and os.path.isfile(
            get_bin_path(path_prefix)
        )


class _TokenFile:
    """Positioned reads of a `.bin` file, for file systems where mapping is slow."""

    def __init__(self, path: str, dtype: np.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._handle = open(path, "rb", buffering=0)  # noqa: SIM115 - lives as long as the data set

    def read(self, start: int, count: int) -> np.ndarray:
        wanted = count * self._dtype.itemsize
        data = bytearray()
        while len(data) < wanted:
            position = start * self._dtype.itemsize + len(data)
            part = os.pread(self._handle.fileno(), wanted - len(data), position)
            if not part:
                raise DataError(f"{self._path} became shorter while it was read; restore the file")
            data += part
        return np.frombuffer(data, self._dtype, count)


def _map(path: str) -> np.ndarray:
    if os.path.getsize(path) == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def _require_files(path_prefix: str, idx_path: str, bin_path: str) -> None:
    missing = [path for path in (idx_path, bin_path) if not os.path.isfile(path)]
    if not missing:
        return
    hint = "a data path is the files' common name, without .bin and .idx"
    if path_prefix.endswith((".bin", ".idx")):
        hint = f"write {path_prefix[:-4]}: {hint}"
    raise DataError(f"no data at {path_prefix!r}: {' and '.join(missing)} not found; {hint}")


def _read_header(idx_path: str) -> _Header:
    """The header, once it fits the size of its file."""
    size = os.path.getsize(idx_path)
    with open(idx_path, "rb") as file:
        raw = file.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise DataError(f"{idx_path} is not the index of an indexed dataset (wrong first bytes)")
    if len(raw) < HEADER.size:
        raise DataError(f"{idx_path} is truncated: {size} bytes, less than the header; rebuild it")
    _, version, code, sequences, boundaries = HEADER.unpack(raw)
    if version != VERSION:
        raise DataError(f"{idx_path} has version {version}; only version {VERSION} can be read")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        raise DataError(
            f"{idx_path} has dtype code {code}, which is no integer token type; use one of "
            f"{', '.join(f'{member.value} ({member.name})' for member in DType)}"
        ) from None
    row = LENGTH_DTYPE.itemsize + POINTER_DTYPE.itemsize
    wanted = HEADER.size + row * sequences + POINTER_DTYPE.itemsize * boundaries
    if size == wanted + sequences and sequences > 0:
        raise DataError(f"{idx_path} has sequence modes: multimodal data cannot be used for GPT")
    if size != wanted:
        raise DataError(
            f"{idx_path} is damaged: its header claims {sequences} sequences and {boundaries} "
            f"document boundaries, that is {wanted} bytes, but the file has {size}; rebuild it"
        )
    return _Header(dtype, sequences, boundaries)


def _check_index(data: IndexedDataset, idx_path: str) -> int:
    """Lengths, pointers and document boundaries agree; returns the number of tokens."""
    itemsize = data.dtype.itemsize
    tokens = 0
    for row in range(0, len(data), _CHECK_ROWS):
        lengths = data.sequence_lengths[row : row + _CHECK_ROWS].astype(np.int64)
        if lengths.min() < 0:
            bad = row + int(lengths.argmin())
            raise DataError(f"{idx_path} is damaged: sequence {bad} has a negative length")
        ends = tokens + np.cumsum(lengths)
        pointers = data.sequence_pointers[row : row + _CHECK_ROWS]
        wrong = np.flatnonzero(pointers != (ends - lengths) * itemsize)
        if len(wrong):
            bad = row + int(wrong[0])
            raise DataError(
                f"{idx_path} is damaged: the pointer of sequence {bad} is "
                f"{int(data.sequence_pointers[bad])}, not the sum of the lengths before it"
            )
        tokens = int(ends[-1])
    _check_boundaries(data.document_indices, len(data), idx_path)
    return tokens


def _check_boundaries(boundaries: np.ndarray, num_sequences: int, idx_path: str) -> None:
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != num_sequences:
        raise DataError(
            f"{idx_path} is damaged: the document boundaries do not run from 0 to {num_sequences}"
        )
    for row in range(0, len(boundaries), _CHECK_ROWS):
        # One row more than the step, so that neighbours across two chunks are compared as well.
        if np.any(np.diff(boundaries[row : row + _CHECK_ROWS + 1]) < 0):
            raise DataError(f"{idx_path} is damaged: its document boundaries decrease")


def _check_bin_size(bin_path: str, wanted: int, idx_path: str) -> None:
    size = os.path.getsize(bin_path)
    if size != wanted:
        state = "truncated" if size < wanted else "too long"
        raise DataError(
            f"{bin_path} is {state}: {size} bytes, but {idx_path} describes {wanted}; the two "
            "files do not belong together, or a copy was cut short"
        )
