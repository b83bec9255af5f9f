r"""The `.idx` file of an indexed dataset, byte by byte.

`PREFIX.bin` is the token ids of all sequences one after another. `PREFIX.idx` is, little-endian and
without padding:

    9 bytes   magic "MMIDIDX\0\0"
    u64       version, 1
    u8        dtype code
    u64       S, the number of sequences
    u64       D, the number of document boundaries (documents + 1)
    i32[S]    sequence lengths in tokens
    i64[S]    sequence pointers in bytes from the start of `.bin`
    i64[D]    document boundaries: document d is the sequences [d, d + 1) of this list
"""

from __future__ import annotations

import enum
import struct

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LENGTH_DTYPE = np.dtype("<i4")
POINTER_DTYPE = np.dtype("<i8")

UINT16_VOCAB_LIMIT = 65500
"""Megatron's writer uses two bytes a token below this vocabulary size."""


class DType(enum.Enum):
    """Token types and their codes in the header."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    uint16 = 8

    @property
    def numpy(self) -> np.dtype:
        """The little-endian numpy type."""
        return np.dtype(self.name).newbyteorder("<")

    @classmethod
    def code_from_dtype(cls, dtype: np.dtype | type) -> int:
        """The header code of a numpy type; KeyError when tokens cannot have that type."""
        return cls[np.dtype(dtype).name].value

    @classmethod
    def dtype_from_code(cls, code: int) -> np.dtype:
        """The numpy type of a header code; ValueError when there is none for tokens."""
        return cls(code).numpy

    @staticmethod
    def optimal_dtype(vocab_size: int | None) -> type[np.integer]:
        """The type Megatron's preprocessing chooses: uint16 below 65500 ids, else int32.

        Args:
            vocab_size: number of token ids; None = unknown, which takes int32.
        """
        if vocab_size is not None and vocab_size < UINT16_VOCAB_LIMIT:
            return np.uint16
        return np.int32


def get_idx_path(path_prefix: str) -> str:
    """`PREFIX.idx`."""
    return path_prefix + ".idx"


def get_bin_path(path_prefix: str) -> str:
    """`PREFIX.bin`."""
    return path_prefix + ".bin"
