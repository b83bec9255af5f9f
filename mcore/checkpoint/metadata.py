"""`metadata.json`: what a checkpoint holds and where. Plain data, checked as it is read.

The format is described in docs/checkpoint_format.md. Nothing read from the file is trusted: names
cannot leave the directory, sizes have to agree with each other before any memory is taken.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from mcore.errors import CheckpointError, DamagedCheckpointError
from mcore.version import __version__

FORMAT = "mcore-checkpoint"
VERSION = 1

# Names of the safetensors format.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: The other way round.
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_CHECKSUM = b',\n"sha256": "'


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A box of a tensor in a file.

    Attributes:
        offsets, sizes: the box in the global tensor.
        file: name of the file in the checkpoint's directory.
        name: name of the box in that safetensors file.
        start: first byte in the file.
        nbytes: number of bytes, row-major and without gaps.
        crc32: CRC-32 (zlib) of the bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    name: str
    start: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A global tensor and the boxes that make it up."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[ChunkRecord, ...]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointMetadata:
    """Everything about a checkpoint except the numbers.

    Attributes:
        iteration: training iteration after which it was saved.
        common: JSON state of the caller.
        layout: parallel layout that rank-local tensors belong to; None = there are none.
        tensors: by key.
        files: by name.
        written_by: versions of what wrote it, for people.
    """

    iteration: int
    common: dict[str, Any]
    layout: dict[str, Any] | None
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    written_by: dict[str, str]


def encode_metadata(metadata: CheckpointMetadata) -> bytes:
    """The bytes of `metadata.json`; the last member is the SHA-256 of all bytes before it.

    Raises:
        CheckpointError: the boxes of a tensor overlap or leave a part of it out.
    """
    for key, record in metadata.tensors.items():
        _check_cover(key, record)
    body = {
        "format": FORMAT,
        "version": VERSION,
        "written_by": metadata.written_by,
        "iteration": metadata.iteration,
        "layout": metadata.layout,
        "common": metadata.common,
        "files": {
            name: {"bytes": record.nbytes, "sha256": record.sha256}
            for name, record in sorted(metadata.files.items())
        },
        "tensors": {
            key: {
                "dtype": DTYPE_NAMES[record.dtype],
                "shape": record.shape,
                "chunks": [_encode_chunk(chunk) for chunk in record.chunks],
            }
            for key, record in sorted(metadata.tensors.items())
        },
    }
    head = json.dumps(body, allow_nan=False)[:-1].encode()
    return head + _CHECKSUM + hashlib.sha256(head).hexdigest().encode() + b'"}\n'


def _encode_chunk(chunk: ChunkRecord) -> dict[str, Any]:
    return {
        "offsets": chunk.offsets,
        "sizes": chunk.sizes,
        "file": chunk.file,
        "name": chunk.name,
        "bytes": [chunk.start, chunk.start + chunk.nbytes],
        "crc32": f"{chunk.crc32:08x}",
    }


def versions() -> dict[str, str]:
    """What writes a checkpoint now."""
    return {"mcore": __version__, "torch": torch.__version__}


def decode_metadata(data: bytes, where: str) -> CheckpointMetadata:
    """Parse and check the bytes of a `metadata.json`.

    Args:
        data: content of the file.
        where: its path, for messages.

    Raises:
        DamagedCheckpointError: damaged, of another format, or it contradicts itself.
        CheckpointError: of another version.
    """
    head, found, tail = data.rpartition(_CHECKSUM)
    if not found or tail != hashlib.sha256(head).hexdigest().encode() + b'"}\n':
        raise DamagedCheckpointError(
            f"{where} is damaged or not of mcore: its checksum does not fit its content"
        )
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{where} is not valid JSON: {error}") from error
    return _Decoder(where).metadata(body)


class _Decoder:
    """Turns JSON values into records and complains with the place of what is wrong."""

    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, problem: str) -> NoReturn:
        raise DamagedCheckpointError(f"{self._where}: {problem}")

    def metadata(self, body: Any) -> CheckpointMetadata:
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            self.fail(f"not a checkpoint of mcore: 'format' is not {FORMAT!r}")
        if body.get("version") != VERSION:
            raise CheckpointError(
                f"{self._where}: format version is {body.get('version')!r}, this mcore reads "
                f"{VERSION}; load it with the version that wrote it ({body.get('written_by')})"
            )
        layout = body.get("layout")
        files = {
            self.file_name(name): self.file(name, value)
            for name, value in self.mapping(body, "files").items()
        }
        tensors = {
            key: self.tensor(key, value, files)
            for key, value in self.mapping(body, "tensors").items()
        }
        self.check_bytes(tensors, files)
        return CheckpointMetadata(
            iteration=self.natural(body.get("iteration"), "'iteration'"),
            common=self.mapping(body, "common"),
            layout=None if layout is None else self.mapping(body, "layout"),
            tensors=tensors,
            files=files,
            written_by=self.mapping(body, "written_by"),
        )

    def mapping(self, body: Mapping[str, Any], name: str) -> dict[str, Any]:
        value = body.get(name)
        if not isinstance(value, dict):
            self.fail(f"{name!r} is {type(value).__name__}, not an object")
        return value

    def natural(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            self.fail(f"{what} is {value!r}, not a natural number")
        return value

    def naturals(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.fail(f"{what} is {value!r}, not a list of numbers")
        return tuple(self.natural(item, what) for item in value)

    def file_name(self, name: Any) -> str:
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            self.fail(
                f"file name {name!r} is not allowed: plain NAME.safetensors in this directory only"
            )
        return name

    def file(self, name: str, value: Any) -> FileRecord:
        if not isinstance(value, dict) or not isinstance(value.get("sha256"), str):
            self.fail(f"the record of file {name} is incomplete")
        return FileRecord(self.natural(value.get("bytes"), f"size of file {name}"), value["sha256"])

    def tensor(self, key: str, value: Any, files: Mapping[str, FileRecord]) -> TensorRecord:
        if not isinstance(value, dict) or not isinstance(value.get("chunks"), list):
            self.fail(f"the record of tensor {key} is incomplete")
        dtype = DTYPES.get(str(value.get("dtype")))
        if dtype is None:
            self.fail(f"tensor {key} has the unknown element type {value.get('dtype')!r}")
        shape = self.naturals(value.get("shape"), f"shape of {key}")
        chunks = tuple(self.chunk(key, item, dtype, files) for item in value["chunks"])
        record = TensorRecord(shape, dtype, chunks)
        try:
            _check_cover(key, record)
        except CheckpointError as error:
            self.fail(str(error))
        return record

    def chunk(
        self, key: str, value: Any, dtype: torch.dtype, files: Mapping[str, FileRecord]
    ) -> ChunkRecord:
        if not isinstance(value, dict):
            self.fail(f"a chunk of {key} is not an object")
        file, name, crc = (value.get(field) for field in ("file", "name", "crc32"))
        if not isinstance(file, str) or file not in files:
            self.fail(f"a chunk of {key} is in {file!r}, which is not among the files")
        if not isinstance(name, str) or not isinstance(crc, str):
            self.fail(f"a chunk of {key} has no name or checksum")
        if not re.fullmatch(r"[0-9a-f]{8}", crc):
            self.fail(f"a chunk of {key} has the checksum {crc!r}, not 8 hexadecimal digits")
        sizes = self.naturals(value.get("sizes"), f"sizes of a chunk of {key}")
        span = self.naturals(value.get("bytes"), f"bytes of a chunk of {key}")
        nbytes = math.prod(sizes) * dtype.itemsize
        if len(span) != 2 or span[1] - span[0] != nbytes or span[1] > files[file].nbytes:
            self.fail(
                f"a chunk of {key} claims bytes {list(span)} of {file}, which does not fit {nbytes}"
            )
        offsets = self.naturals(value.get("offsets"), f"offsets of a chunk of {key}")
        return ChunkRecord(offsets, sizes, file, name, span[0], nbytes, int(crc, 16))

    def check_bytes(
        self, tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]
    ) -> None:
        """No byte of a file may serve twice, or a small file could claim any amount of memory."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
        for record in tensors.values():
            for chunk in record.chunks:
                spans[chunk.file].append((chunk.start, chunk.start + chunk.nbytes))
        for name, ranges in spans.items():
            ranges.sort()
            for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False):
                if start < end:
                    self.fail(f"two chunks share bytes of {name}")


def _check_cover(key: str, record: TensorRecord) -> None:
    """Raise `CheckpointError` unless the boxes cover the tensor exactly once."""
    shape, covered = record.shape, 0
    for chunk in record.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape) and all(
            start + size <= extent
            for start, size, extent in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not inside:
            raise CheckpointError(
                f"tensor {key} of shape {list(shape)} has a chunk {list(chunk.sizes)} at "
                f"{list(chunk.offsets)} outside of it"
            )
        covered += math.prod(chunk.sizes)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"the chunks of tensor {key} hold {covered} of its {math.prod(shape)} elements"
        )
    if len(record.chunks) > 1 and _any_overlap(record):
        raise CheckpointError(f"two chunks of tensor {key} overlap")


def _any_overlap(record: TensorRecord) -> bool:
    sweep = max(range(len(record.shape)), key=lambda d: len({c.offsets[d] for c in record.chunks}))
    active: list[ChunkRecord] = []
    for chunk in sorted(record.chunks, key=lambda c: c.offsets[sweep]):
        start = chunk.offsets[sweep]
        active = [other for other in active if other.offsets[sweep] + other.sizes[sweep] > start]
        if any(_overlap(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _overlap(a: ChunkRecord, b: ChunkRecord) -> bool:
    return all(
        x < y + m and y < x + n
        for x, n, y, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )
