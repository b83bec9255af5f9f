"""Input files of the preprocessing tool, cut into chunks of whole records, in order.

| name ends in | what it holds |
|---|---|
| `.txt` | one document a file, or with `--txt-documents line` one a line |
| `.parquet` | one record a row; needs pyarrow |
| anything else, and `-` (standard input) | one JSON object a line |

Each but Parquet may be compressed by gzip, bzip2 or xz, or by zstandard where that package is
installed; the first bytes say so, not the name.
"""

from __future__ import annotations

import bz2
import dataclasses
import glob
import gzip
import importlib
import io
import lzma
import os
import sys
import typing
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from mcore.errors import ConfigError, DataError, McoreError

STDIN = "-"
CHUNK_BYTES = 1 << 18  # a task of some 20 ms: large beside its overhead, small beside memory
ROWS_AT_ONCE = 1024

Kind = Literal["json", "line", "file", "row"]

_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"BZh": "bz2", b"\xfd7zXZ": "xz"}


class CutShortError(McoreError):
    """A run that cannot go on though its data is not at fault; what it has done stays good."""


class Place(NamedTuple):
    """Where in the input a chunk begins: number of the file, bytes or rows before, next line."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive records of one file.

    Attributes:
        path: the file.
        kind: `json` and `line`: records are lines; `file`: one record; `row`: rows of a table.
        first_line: number of the first record's line or row, from 1.
        data: the bytes of all lines, or the rows.
        after: where the next chunk begins.
        stored: how many bytes of the file, as stored, have been read so far.
    """

    path: str
    kind: Kind
    first_line: int
    data: bytes | list[dict[str, Any]]
    after: Place
    stored: int


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Input files in order: names as given, patterns as their sorted matches.

    Raises:
        DataError: a name or pattern stands for no file.
        ConfigError: standard input beside other inputs.
    """
    if STDIN in patterns:
        if len(patterns) > 1:
            raise ConfigError("--input: - (standard input) cannot stand beside other inputs")
        return [STDIN]
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise DataError(f"--input: there is no file {pattern!r}")
        paths.extend(found)
    return paths


def read_chunks(
    paths: Sequence[str],
    columns: Sequence[str],
    txt_documents: Literal["file", "line"] = "file",
    start: Place | None = None,
) -> Iterator[Chunk]:
    """Read the inputs from a place on.

    Args:
        paths: what `expand_inputs` returned.
        columns: keys wanted; only these are read of a table.
        txt_documents: what a document of a text file is.
        start: the `after` of an earlier chunk; None = the beginning.

    Raises:
        DataError: a file cannot be read; the message names it and the line reached.
        ConfigError: a file that needs a package which is not installed.
    """
    first = Place() if start is None else start
    for number in range(first.file, len(paths)):
        place = first if number == first.file else Place(number)
        path = paths[number]
        kind = _kind(path, txt_documents)
        if kind == "row":
            yield from _read_rows(path, columns, place)
        else:
            yield from _read_lines(path, kind, place)


def _kind(path: str, txt_documents: Literal["file", "line"]) -> Kind:
    stem = path
    for suffix in _SUFFIXES:
        stem = stem.removesuffix(suffix)
    if stem.endswith(".txt"):
        return txt_documents
    return "row" if stem.endswith(".parquet") else "json"


def _read_lines(path: str, kind: Kind, place: Place) -> Iterator[Chunk]:
    offset, line = place.offset, place.line
    try:
        with _open_raw(path) as raw:
            stream = _unpack(path, raw)
            _skip(stream, offset)
            while data := stream.read(-1 if kind == "file" else CHUNK_BYTES):
                if kind != "file":
                    data += stream.readline()
                first, line = line, line + data.count(b"\n")
                offset += len(data)
                stored = offset if path == STDIN else raw.tell()
                yield Chunk(path, kind, first, data, Place(place.file, offset, line), stored)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(error)(f"{path}, from line {line} on: cannot be read: {error}") from error


def _unreadable(error: Exception) -> type[McoreError]:
    """Whether the system could not read, or what it read is damaged."""
    from_system = isinstance(error, OSError) and error.errno is not None
    return CutShortError if from_system else DataError


def _open_raw(path: str) -> typing.BinaryIO:
    if path == STDIN:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    return open(path, "rb")


def _unpack(path: str, raw: typing.BinaryIO) -> typing.BinaryIO:
    start = typing.cast(io.BufferedReader, raw).peek(8)
    packing = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)
    if packing is None:
        return raw
    if packing == "gzip":
        return typing.cast(typing.BinaryIO, gzip.GzipFile(fileobj=raw))
    if packing == "bz2":
        return typing.cast(typing.BinaryIO, bz2.BZ2File(raw))
    if packing == "xz":
        return typing.cast(typing.BinaryIO, lzma.LZMAFile(raw))
    zstandard = _optional("zstandard", path)
    return io.BufferedReader(_ZstandardReader(raw, zstandard), CHUNK_BYTES)


class _ZstandardReader(io.RawIOBase):
    """Frames one after another; the library's own reader takes a frame cut short for its end.

    Raises:
        EOFError: the input ends within a frame.
        OSError: damaged data.
    """

    def __init__(self, raw: typing.BinaryIO, zstandard: Any) -> None:
        self._raw = raw
        self._error: type[Exception] = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame: Any = None  # that is being read
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._packed or self._raw.read(CHUNK_BYTES)
            if not packed and self._frame is not None:
                raise EOFError("it ends within a zstandard frame: the file is cut short")
            if not packed:
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        try:
            self._ready = memoryview(self._frame.decompress(packed))
        except self._error as error:
            raise OSError(str(error)) from error
        self._packed = self._frame.unused_data
        if self._frame.eof:
            self._frame = None


def _skip(stream: typing.BinaryIO, count: int) -> None:
    """Go on to a place; a compressed stream has to be read up to there."""
    if stream.seekable():
        stream.seek(count)
        return
    while count > 0:
        part = stream.read(min(count, CHUNK_BYTES))
        if not part:
            raise EOFError("the file is shorter than when the run was interrupted")
        count -= len(part)


def _read_rows(path: str, columns: Sequence[str], place: Place) -> Iterator[Chunk]:
    pyarrow = _optional("pyarrow", path)
    parquet = importlib.import_module("pyarrow.parquet")
    number = 0
    size = os.path.getsize(path)
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            absent = [column for column in columns if column not in names]
            if absent:
                raise DataError(
                    f"{path}: there is no column {absent[0]!r} (--json-keys); the columns are "
                    f"{names}"
                )
            total = max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=list(columns)):
                rows = batch.to_pylist()
                first, number = number, number + len(rows)
                if number <= place.offset:
                    continue
                after = Place(place.file, number, number + 1)
                yield Chunk(path, "row", first + 1, rows, after, size * number // total)
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(error)(
            f"{path}, from row {number + 1} on: cannot be read: {error}"
        ) from error


def _optional(package: str, path: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the Python package {package}, which is not installed; install it "
            "(mcore[data]), or convert the file"
        ) from error
