"""JSON lines to token ids on several processes, in the order of the input.

The part of `preprocess_data.py` between the input files and the writer: reading, tokenizing, and
the pool of workers. Every error names file and line, and the first faulty line of the input is the
one reported, whatever the number of workers.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import glob
import gzip
import json
import logging
import multiprocessing
import os
import signal
import threading
import typing
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from mcore.config.tokenizer import TokenizerConfig
from mcore.errors import DataError
from mcore.log import get_logger
from mcore.tokenizers import Tokenizer, build_tokenizer

CHUNK_BYTES = 1 << 18  # of JSON a task: some 0.1 s of tokenizing, so that progress and memory flow
CHUNK_LINES = 4096
TASKS_IN_FLIGHT = 4  # per worker; bounds the memory when one long document holds up the order


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeJob:
    """All that a worker needs to know, the same for every chunk."""

    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...]
    append_eod: bool
    dtype: str


class Chunk(NamedTuple):
    """Consecutive lines of one file."""

    path: str
    first_line: int
    lines: list[bytes]


class EncodedChunk(NamedTuple):
    """The documents of a chunk under one key: tokens, tokens a sequence, sequences a document."""

    tokens: np.ndarray
    sequence_lengths: np.ndarray
    sequence_counts: np.ndarray


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Input files in order: names as given, patterns as their sorted matches.

    Raises:
        DataError: a name or pattern stands for no file.
    """
    paths: list[str] = []
    for pattern in patterns:
        found = [pattern] if os.path.isfile(pattern) else sorted(glob.glob(pattern, recursive=True))
        found = [path for path in found if os.path.isfile(path)]
        if not found:
            raise DataError(f"--input: there is no file {pattern!r}")
        paths.extend(found)
    return paths


def read_chunks(paths: Sequence[str]) -> Iterator[Chunk]:
    """Cut files into chunks of whole lines, in order.

    Raises:
        DataError: a file cannot be read; the message names it and the line reached.
    """
    for path in paths:
        first, lines, size = 1, list[bytes](), 0
        try:
            with _open(path) as stream:
                for line in stream:
                    lines.append(line)
                    size += len(line)
                    if size >= CHUNK_BYTES or len(lines) >= CHUNK_LINES:
                        yield Chunk(path, first, lines)
                        first, lines, size = first + len(lines), [], 0
        except (OSError, EOFError, zlib.error) as error:
            line_number = first + len(lines)
            raise DataError(f"{path}, line {line_number}: cannot be read: {error}") from error
        if lines:
            yield Chunk(path, first, lines)


def _open(path: str) -> typing.BinaryIO:
    with open(path, "rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return typing.cast(typing.BinaryIO, gzip.open(path, "rb") if packed else open(path, "rb"))


@functools.cache
def cached_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration, loaded once a process."""
    return build_tokenizer(config)


def encode_chunk(job: EncodeJob, chunk: Chunk) -> dict[str, EncodedChunk]:
    """Tokenize every document of a chunk, under every key.

    Raises:
        DataError: a line is no JSON object, lacks a key, or holds something else than text there;
            the message names file and line.
    """
    tokenizer = cached_tokenizer(job.tokenizer)
    documents: dict[str, list[list[str]]] = {key: [] for key in job.json_keys}
    places: list[str] = []
    for number, line in enumerate(chunk.lines, start=chunk.first_line):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.isspace() or not line:
            continue
        place = f"{chunk.path}, line {number}"
        record = _parse(line, place)
        for key in job.json_keys:
            documents[key].append(_texts(record, key, place))
        places.append(place)
    return {key: _encode(job, tokenizer, documents[key], places) for key in job.json_keys}


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: no JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: a JSON object is needed, got {type(record).__name__}")
    return record


def _texts(record: dict[str, Any], key: str, place: str) -> list[str]:
    if key not in record:
        raise DataError(
            f"{place}: there is no key {key!r} (--json-keys); the keys are {list(record)}"
        )
    value = record[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            kind = type(text).__name__
            raise DataError(f"{place}: {key!r} must be a text or a list of texts, got {kind}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{place}: {key!r} has half a surrogate pair: {error}") from error
    return texts


def _encode(
    job: EncodeJob, tokenizer: Tokenizer, documents: list[list[str]], places: list[str]
) -> EncodedChunk:
    encoded = iter(_tokenize(tokenizer, documents, places))
    flat: list[int] = []
    lengths: list[int] = []
    counts: list[int] = []
    for texts in documents:
        sequences = [ids for ids in (next(encoded) for _ in texts) if ids]
        if sequences and job.append_eod:
            sequences[-1].append(tokenizer.eod)
        for ids in sequences:
            flat.extend(ids)
            lengths.append(len(ids))
        counts.append(len(sequences))
    return EncodedChunk(
        np.array(flat, dtype=job.dtype),
        np.array(lengths, dtype=np.int64),
        np.array(counts, dtype=np.int64),
    )


def _tokenize(
    tokenizer: Tokenizer, documents: list[list[str]], places: list[str]
) -> list[list[int]]:
    try:
        return tokenizer.tokenize_batch([text for texts in documents for text in texts])
    except DataError:
        for texts, place in zip(documents, places, strict=True):
            for text in texts:
                try:
                    tokenizer.tokenize(text)
                except DataError as error:
                    raise DataError(f"{place}: {error}") from error
        raise


def encode_in_order(
    job: EncodeJob, chunks: Iterator[Chunk], workers: int
) -> Iterator[tuple[Chunk, dict[str, EncodedChunk]]]:
    """Encode chunks on `workers` processes and hand them back in input order.

    One worker means this process. Memory stays bounded: few chunks are under way at any time.

    Raises:
        DataError: of the first faulty line in input order, or that a worker died.
    """
    if workers == 1:
        _one_thread_each()
        for chunk in chunks:
            yield chunk, encode_chunk(job, chunk)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker
    )
    under_way: collections.deque[tuple[Chunk, concurrent.futures.Future[Any]]]
    under_way = collections.deque()
    try:
        for chunk in chunks:
            under_way.append((chunk, pool.submit(encode_chunk, job, chunk)))
            if len(under_way) >= TASKS_IN_FLIGHT * workers:
                first, result = under_way.popleft()
                yield first, result.result()
        while under_way:
            first, result = under_way.popleft()
            yield first, result.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, perhaps for lack of memory; try fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _one_thread_each() -> None:
    # --workers is the measure of parallelism; the library would start threads on every core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops and winds the workers up
    get_logger().setLevel(logging.ERROR)  # the parent has warned already
    _one_thread_each()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
