"""Writer of an indexed dataset; the files appear whole or not at all (see `indexed_format`)."""

from __future__ import annotations

import array
import os
import shutil
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

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
from mcore.errors import DataError

if TYPE_CHECKING:
    import torch

_ROWS = 1 << 20  # index rows written together
_COPY_BYTES = 16 << 20

Tokens: TypeAlias = "Sequence[int] | np.ndarray | torch.Tensor"


class IndexedDatasetBuilder:
    """Appends sequences to `PREFIX.bin`, then writes `PREFIX.idx`.

    Both files are written under temporary names and renamed by `finalize`, `.bin` first: an index
    that exists is complete. Memory is 12 bytes a sequence, whatever the length of the corpus. As a
    context manager it removes what is unfinished when the block fails.

    Args:
        bin_path: the `.bin` file to make; an existing one is replaced by `finalize`.
        dtype: token type; `DType.optimal_dtype(vocab_size)` is Megatron's choice.

    Raises:
        DataError: a dtype that tokens cannot have.
    """

    def __init__(self, bin_path: str, dtype: type[np.integer] | np.dtype = np.int32) -> None:
        try:
            self._code = DType.code_from_dtype(dtype)
        except KeyError:
            names = ", ".join(member.name for member in DType)
            raise DataError(
                f"tokens cannot be {np.dtype(dtype).name}; use one of {names}"
            ) from None
        self._dtype = DType.dtype_from_code(self._code)
        self._bin_path = bin_path
        self._lengths = array.array("i")
        self._boundaries = array.array("q", [0])
        self._bin: BinaryIO | None = open(_partial(bin_path), "wb")  # noqa: SIM115 - until finalize

    def add_item(self, tokens: Tokens) -> None:
        """Append one sequence, [length]; `end_document` closes its document.

        Raises:
            DataError: a token id that the dtype cannot hold.
        """
        self._write(tokens)

    def end_document(self) -> None:
        """The sequences since the last document are a document (possibly an empty one)."""
        self._boundaries.append(len(self._lengths))

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
        self._write(tokens, lengths)
        self.end_document()

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
        offset = len(self._lengths)
        for row in range(0, len(other), _ROWS):
            self._lengths.frombytes(
                other.sequence_lengths[row : row + _ROWS].astype(np.int32).tobytes()
            )
        for row in range(1, len(other.document_indices), _ROWS):
            boundaries = other.document_indices[row : row + _ROWS].astype(np.int64) + offset
            self._boundaries.frombytes(boundaries.tobytes())
        with open(get_bin_path(path_prefix), "rb") as source:
            shutil.copyfileobj(source, self._open_bin(), _COPY_BYTES)

    def finalize(self, idx_path: str) -> None:
        """Write the index and give both files their names; the builder is then closed.

        Args:
            idx_path: the `.idx` file to make; an existing one is replaced.

        Raises:
            DataError: sequences after the last `end_document`.
        """
        if self._boundaries[-1] != len(self._lengths):
            open_sequences = len(self._lengths) - self._boundaries[-1]
            raise DataError(f"{open_sequences} sequences belong to no document; call end_document")
        _sync_and_close(self._open_bin())
        self._bin = None
        with open(_partial(idx_path), "wb") as file:
            self._write_index(file)
            _sync_and_close(file)
        if os.path.exists(idx_path):
            os.remove(idx_path)  # an old index must never describe the new tokens
        os.replace(_partial(self._bin_path), self._bin_path)
        os.replace(_partial(idx_path), idx_path)

    def discard(self) -> None:
        """Close without a result and remove the temporary file."""
        if self._bin is not None:
            self._bin.close()
            self._bin = None
            os.remove(_partial(self._bin_path))

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def _open_bin(self) -> BinaryIO:
        if self._bin is None:
            raise DataError(f"{self._bin_path} is finished; nothing can be added to it")
        return self._bin

    def _write(self, tokens: Tokens, lengths: Sequence[int] | None = None) -> None:
        values = np.asarray(tokens) if len(tokens) else np.empty(0, self._dtype)
        self._check_range(values)
        try:
            self._lengths.extend([len(values)] if lengths is None else lengths)
        except OverflowError:
            raise DataError("a sequence cannot have 2^31 tokens or more; split it") from None
        self._open_bin().write(np.ascontiguousarray(values, self._dtype).data)

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

    def _write_index(self, file: BinaryIO) -> None:
        sequences = len(self._lengths)
        file.write(HEADER.pack(MAGIC, VERSION, self._code, sequences, len(self._boundaries)))
        lengths = np.frombuffer(self._lengths, np.intc)
        file.write(lengths.astype(LENGTH_DTYPE, copy=False).data)
        position = 0
        for row in range(0, sequences, _ROWS):
            sizes = lengths[row : row + _ROWS].astype(np.int64) * self._dtype.itemsize
            ends = position + np.cumsum(sizes)
            file.write((ends - sizes).astype(POINTER_DTYPE, copy=False).data)
            position = int(ends[-1])
        boundaries = np.frombuffer(self._boundaries, np.int64)
        file.write(boundaries.astype(POINTER_DTYPE, copy=False).data)


def _partial(path: str) -> str:
    return path + ".partial"


def _sync_and_close(file: BinaryIO) -> None:
    """The bytes are on the disk before a rename makes them visible."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
