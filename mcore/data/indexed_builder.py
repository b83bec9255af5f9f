"""Writer of an indexed dataset; the files appear whole or not at all (see `indexed_format`)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from mcore.data.indexed_dataset import IndexedDataset
from mcore.data.indexed_format import (
    HEADER,
    LENGTH_DTYPE,
    MAGIC,
    POINTER_DTYPE,
    VERSION,
    DType,
    get_bin_path,
)
from mcore.data.publishing import helper_paths, partial_path, publish
from mcore.errors import DataError

if TYPE_CHECKING:
    import torch

_ROWS = 1 << 16  # index rows written together
_COPY_BYTES = 1 << 20

Tokens: TypeAlias = "Sequence[int] | np.ndarray | torch.Tensor"


class BuilderState(NamedTuple):
    """How much of an unfinished dataset is safely on the disk."""

    tokens: int
    sequences: int
    documents: int


class IndexedDatasetBuilder:
    """Appends sequences to `PREFIX.bin`, then writes `PREFIX.idx`.

    All is written under temporary names and renamed by `finalize`, `.bin` first: an index that
    exists is complete. Who has to survive a kill between two renames calls `seal` and `publish`
    instead. Lengths and document boundaries wait on the disk as well, so that memory is the same
    for any corpus. As a context manager it removes what is unfinished when the block fails.

    Args:
        bin_path: the `.bin` file to make; an existing one is replaced by `finalize`.
        dtype: token type; `DType.optimal_dtype(vocab_size)` is Megatron's choice.
        resume: go on with the temporary files of an earlier process from this state of theirs.

    Raises:
        DataError: a dtype that tokens cannot have, or temporary files that are gone or shorter than
            `resume` says.
    """

    def __init__(
        self,
        bin_path: str,
        dtype: type[np.integer] | np.dtype = np.int32,
        *,
        resume: BuilderState | None = None,
    ) -> None:
        try:
            self._code = DType.code_from_dtype(dtype)
        except KeyError:
            names = ", ".join(member.name for member in DType)
            raise DataError(
                f"tokens cannot be {np.dtype(dtype).name}; use one of {names}"
            ) from None
        self._dtype = DType.dtype_from_code(self._code)
        self._bin_path = bin_path
        state = BuilderState(0, 0, 0) if resume is None else resume
        self._tokens, self._sequences, self._documents = state
        self._closed_sequences = self._sequences
        self._sealed_index: str | None = None
        sizes = (
            state.tokens * self._dtype.itemsize,
            state.sequences * LENGTH_DTYPE.itemsize,
            state.documents * POINTER_DTYPE.itemsize,
        )
        self._files: list[BinaryIO] | None = [
            _open_partial(path, size) for path, size in zip(self._paths(), sizes, strict=True)
        ]

    @property
    def state(self) -> BuilderState:
        """How much was added so far."""
        return BuilderState(self._tokens, self._sequences, self._documents)

    def _paths(self) -> list[str]:
        """Temporary files: tokens, sequence lengths, document ends."""
        return [partial_path(self._bin_path), *helper_paths(self._bin_path)]

    def add_item(self, tokens: Tokens) -> None:
        """Append one sequence, [length]; `end_document` closes its document.

        Raises:
            DataError: a token id that the dtype cannot hold.
        """
        self._write(tokens)

    def end_document(self) -> None:
        """The sequences since the last document are a document (possibly an empty one)."""
        self._end_documents(np.array([self._sequences], np.int64))

    def add_document(self, tokens: Tokens, lengths: Sequence[int]) -> None:
        """Append one document.

        Args:
            tokens: the tokens of all its sequences, [sum(lengths)].
            lengths: the length of each sequence.

        Raises:
            DataError: lengths that do not sum to the tokens, or an id that the dtype cannot hold.
        """
        if sum(lengths) != len(tokens) or min(lengths, default=0) < 0:
            raise DataError(
                f"a document of {len(tokens)} tokens cannot have sequences of lengths "
                f"{list(lengths)}"
            )
        self._write(tokens, np.asarray(lengths, np.int64))
        self.end_document()

    def add_documents(
        self, tokens: np.ndarray, sequence_lengths: np.ndarray, sequence_counts: np.ndarray
    ) -> None:
        """Append many documents at once.

        Args:
            tokens: all tokens end to end, [tokens].
            sequence_lengths: tokens of each sequence, [sequences].
            sequence_counts: sequences of each document, [documents].

        Raises:
            DataError: an id that the dtype cannot hold, or a sequence of 2^31 tokens.
        """
        assert sequence_lengths.sum() == len(tokens)
        assert sequence_counts.sum() == len(sequence_lengths)
        ends = self._sequences + np.cumsum(sequence_counts, dtype=np.int64)
        self._write(tokens, sequence_lengths)
        self._end_documents(ends)

    def add_index(self, path_prefix: str) -> None:
        """Append a whole indexed dataset of the same dtype, document for document.

        Raises:
            DataError: the other dataset is damaged or has another dtype.
        """
        other = IndexedDataset(path_prefix)
        if other.dtype != self._dtype:
            raise DataError(
                f"{path_prefix} holds {other.dtype.name} tokens and cannot be appended to "
                f"{self._dtype.name}; preprocess both with the same tokenizer"
            )
        offset = self._sequences
        tokens_file, lengths_file, _ = self._open_files()
        for row in range(0, len(other), _ROWS):
            lengths_file.write(other.sequence_lengths[row : row + _ROWS].tobytes())
        with open(get_bin_path(path_prefix), "rb") as source:
            shutil.copyfileobj(source, tokens_file, _COPY_BYTES)
        self._tokens += other.num_tokens
        self._sequences += len(other)
        for row in range(1, len(other.document_indices), _ROWS):
            self._end_documents(other.document_indices[row : row + _ROWS] + offset)

    def save_state(self) -> BuilderState:
        """Bring everything to the disk; a later builder can `resume` from what this returns."""
        for file in self._open_files():
            file.flush()
            os.fsync(file.fileno())
        return self.state

    def finalize(self, idx_path: str) -> None:
        """`seal`, then `publish`; the builder is then closed.

        Args:
            idx_path: the `.idx` file to make; an existing one is replaced.

        Raises:
            DataError: sequences after the last `end_document`.
        """
        self.seal(idx_path)
        publish(self._bin_path, idx_path)

    def seal(self, idx_path: str) -> None:
        """Write the index and bring all to the disk, still under temporary names, and close.

        Args:
            idx_path: the `.idx` file to be.

        Raises:
            DataError: sequences after the last `end_document`.
        """
        files = self._open_files()
        if self._closed_sequences != self._sequences:
            open_sequences = self._sequences - self._closed_sequences
            raise DataError(f"{open_sequences} sequences belong to no document; call end_document")
        for file in files:
            file.flush()
            os.fsync(file.fileno())
        with open(partial_path(idx_path), "wb") as index:
            self._sealed_index = index.name
            self._write_index(index)
            index.flush()
            os.fsync(index.fileno())
        self.suspend()

    def discard(self) -> None:
        """Close without a result and remove the temporary files."""
        self.suspend()
        for path in (*self._paths(), *filter(None, [self._sealed_index])):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path)

    def suspend(self) -> None:
        """Close and keep the temporary files, for a later builder to `resume`."""
        files, self._files = self._files, None
        for file in files or ():
            with contextlib.suppress(OSError):  # a full disk takes no rest; what counts was flushed
                file.close()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._files is not None:
            self.discard()

    def _open_files(self) -> list[BinaryIO]:
        if self._files is None:
            raise DataError(f"{self._bin_path} is finished; nothing can be added to it")
        return self._files

    def _write(self, tokens: Tokens, lengths: np.ndarray | None = None) -> None:
        tokens_file, lengths_file, _ = self._open_files()
        values = np.asarray(tokens) if len(tokens) else np.empty(0, self._dtype)
        self._check_range(values)
        rows = np.array([len(values)], np.int64) if lengths is None else lengths
        if len(rows) and int(rows.max()) > np.iinfo(LENGTH_DTYPE).max:
            raise DataError("a sequence cannot have 2^31 tokens or more; split it")
        lengths_file.write(rows.astype(LENGTH_DTYPE).data)
        tokens_file.write(np.ascontiguousarray(values, self._dtype).data)
        self._tokens += len(values)
        self._sequences += len(rows)

    def _end_documents(self, ends: np.ndarray) -> None:
        self._open_files()[2].write(ends.astype(POINTER_DTYPE).data)
        self._documents += len(ends)
        if len(ends):
            self._closed_sequences = int(ends[-1])

    def _check_range(self, values: np.ndarray) -> None:
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise DataError(
                f"a sequence is one row of integers, not {values.dtype} of shape {values.shape}"
            )
        if values.dtype == self._dtype or not len(values):
            return
        limits = np.iinfo(self._dtype)
        low, high = int(values.min()), int(values.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"token id {high if high > limits.max else low} does not fit {self._dtype.name} "
                f"({limits.min} to {limits.max}); use a wider dtype"
            )

    def _write_index(self, index: BinaryIO) -> None:
        _, lengths_path, documents_path = self._paths()
        index.write(HEADER.pack(MAGIC, VERSION, self._code, self._sequences, self._documents + 1))
        with open(lengths_path, "rb") as lengths:
            shutil.copyfileobj(lengths, index, _COPY_BYTES)
        position = 0
        with open(lengths_path, "rb") as lengths:
            for _ in range(0, self._sequences, _ROWS):
                rows = np.fromfile(lengths, LENGTH_DTYPE, _ROWS).astype(np.int64)
                ends = position + np.cumsum(rows * self._dtype.itemsize)
                index.write((ends - rows * self._dtype.itemsize).astype(POINTER_DTYPE).data)
                position = int(ends[-1])
        index.write(np.zeros(1, POINTER_DTYPE).data)
        with open(documents_path, "rb") as documents:
            shutil.copyfileobj(documents, index, _COPY_BYTES)


def _open_partial(path: str, size: int) -> BinaryIO:
    """A temporary file cut to the size that an earlier process was sure of; 0 = a new one."""
    if size == 0:
        return open(path, "wb")
    if not os.path.exists(path) or os.path.getsize(path) < size:
        raise DataError(
            f"{path} is gone or shorter than the {size} bytes on record; restore it, or remove the "
            "record and start anew"
        )
    file = open(path, "r+b")  # noqa: SIM115 - the builder's until it is sealed
    file.truncate(size)
    file.seek(size)
    return file
