"""Records to token ids on several processes, in the order of the input.

The part of `preprocess_data.py` between the reader and the writer: parsing, tokenizing, and the
pool of workers. Every error names file and line, and the first faulty line of the input is the one
reported, whatever the number of workers.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mcore.config.tokenizer import TokenizerConfig
from mcore.errors import DataError
from mcore.log import get_logger
from mcore.tokenizers import Tokenizer, build_tokenizer, encode_texts
from tools.corpus_reading import Chunk
from tools.sentence_splitting import Splitter, build_splitter
from tools.worker_pool import map_in_order


@dataclasses.dataclass(frozen=True, slots=True)
class EncodeJob:
    """All that a worker needs to know, the same for every chunk.

    Attributes:
        tokenizer: makes the ids.
        json_keys: keys of the records that are tokenized.
        append_eod: end documents that have tokens with the end-of-document id.
        dtype: of the ids.
        skip_bad: leave faulty records out rather than fail.
        language: split texts into sentences of it; None = a text is one sequence.
        keep_newlines: leave white space between sentences at their ends.
    """

    tokenizer: TokenizerConfig
    json_keys: tuple[str, ...]
    append_eod: bool
    dtype: str
    skip_bad: bool = False
    language: str | None = None
    keep_newlines: bool = False


class EncodedPart(NamedTuple):
    """The documents of a chunk under one key: tokens, tokens a sequence, sequences a document."""

    tokens: np.ndarray
    sequence_lengths: np.ndarray
    sequence_counts: np.ndarray


class EncodedChunk(NamedTuple):
    """What a chunk became.

    Attributes:
        parts: documents by key.
        faults: what was wrong with records that were left out.
        text_bytes: UTF-8 bytes of the texts.
    """

    parts: dict[str, EncodedPart]
    faults: list[str]
    text_bytes: int


@dataclasses.dataclass(slots=True)
class _Documents:
    """Parsed records of a chunk.

    Attributes:
        texts: for each key, the texts of each document.
        places: file and line of each document.
        faults: records that were left out.
    """

    texts: dict[str, list[list[str]]]
    places: list[str] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def cached_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration, loaded once a process."""
    return build_tokenizer(config)


@functools.cache
def _cached_splitter(language: str, keep_newlines: bool) -> Splitter:
    return build_splitter(language, keep_newlines)[0]


def encode_chunk(job: EncodeJob, chunk: Chunk) -> EncodedChunk:
    """Tokenize every document of a chunk, under every key.

    Raises:
        DataError: (unless `skip_bad`) a record is no JSON object, lacks a key, or holds something
            else than text there; the message names file and line.
    """
    documents = _Documents({key: [] for key in job.json_keys})
    for place, source in _records(chunk):
        try:
            texts = _texts_of(job, chunk, source)
        except DataError as error:
            _fault(job, documents, f"{place}: {error}")
            continue
        documents.places.append(place)
        for key, values in texts.items():
            documents.texts[key].append(values)
    try:
        parts = _encode_all(job, documents)
    except DataError:
        _leave_out_untokenizable(job, documents)
        parts = _encode_all(job, documents)
    text_bytes = sum(
        len(text) if text.isascii() else len(text.encode())
        for texts in documents.texts.values()
        for document in texts
        for text in document
    )
    return EncodedChunk(parts, documents.faults, text_bytes)


def _fault(job: EncodeJob, documents: _Documents, message: str) -> None:
    if not job.skip_bad:
        raise DataError(message)
    documents.faults.append(message)


def _records(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    """(place in words, bytes or row) of each record; blank lines are none."""
    if isinstance(chunk.data, list):
        for number, row in enumerate(chunk.data, chunk.first_line):
            yield f"{chunk.path}, row {number}", row
        return
    data = chunk.data
    if chunk.first_line == 1:
        data = data.removeprefix(b"\xef\xbb\xbf")
    if chunk.kind == "file":
        yield chunk.path, data
        return
    for number, line in enumerate(data.split(b"\n"), chunk.first_line):
        if line and not line.isspace():
            yield f"{chunk.path}, line {number}", line


def _texts_of(job: EncodeJob, chunk: Chunk, source: Any) -> dict[str, list[str]]:
    """The texts of one record under each key."""
    if chunk.kind in ("json", "row"):
        record = _parse(source) if chunk.kind == "json" else source
        texts = {key: _texts(record, key) for key in job.json_keys}
    else:
        texts = {key: [_decode(source)] for key in job.json_keys}
    if job.language is None:
        return texts
    split = _cached_splitter(job.language, job.keep_newlines)
    return {
        key: [sentence for text in values for sentence in split(text)]
        for key, values in texts.items()
    }


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"no UTF-8: {error}") from error


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"no JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"a JSON object is needed, got {type(record).__name__}")
    return record


def _texts(record: dict[str, Any], key: str) -> list[str]:
    if key not in record:
        raise DataError(f"there is no key {key!r} (--json-keys); the keys are {list(record)}")
    value = record[key]
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            kind = type(text).__name__
            raise DataError(f"{key!r} must be a text or a list of texts, got {kind}")
        if text.isascii():
            continue
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"{key!r} has half a surrogate pair: {error}") from error
    return texts


def _encode_all(job: EncodeJob, documents: _Documents) -> dict[str, EncodedPart]:
    return {key: _encode(job, texts) for key, texts in documents.texts.items()}


def _encode(job: EncodeJob, documents: list[list[str]]) -> EncodedPart:
    tokenizer = cached_tokenizer(job.tokenizer)
    ids, lengths = encode_texts(tokenizer, [text for texts in documents for text in texts])
    texts_of = np.fromiter(map(len, documents), np.int64, len(documents))
    document = np.repeat(np.arange(len(documents)), texts_of)[lengths > 0]
    ends = np.cumsum(lengths)[lengths > 0]
    lengths = lengths[lengths > 0]
    if job.append_eod and len(lengths):
        is_last = np.append(document[1:] != document[:-1], True)
        ids = np.insert(ids, ends[is_last], tokenizer.eod)
        lengths = lengths + is_last
    counts = np.bincount(document, minlength=len(documents)).astype(np.int64)
    return EncodedPart(ids.astype(job.dtype), lengths.astype(np.int64), counts)


def _leave_out_untokenizable(job: EncodeJob, documents: _Documents) -> None:
    """Find the records that the tokenizer refuses, one by one."""
    tokenizer = cached_tokenizer(job.tokenizer)
    good: list[int] = []
    for number, place in enumerate(documents.places):
        try:
            for texts in documents.texts.values():
                for text in texts[number]:
                    tokenizer.tokenize(text)
        except DataError as error:
            _fault(job, documents, f"{place}: {error}")
            continue
        good.append(number)
    documents.places = [documents.places[number] for number in good]
    for key, texts in documents.texts.items():
        documents.texts[key] = [texts[number] for number in good]


def encode_in_order(
    job: EncodeJob, chunks: Iterator[Chunk], workers: int
) -> Iterator[tuple[Chunk, EncodedChunk]]:
    """Encode chunks on `workers` processes and hand them back in input order.

    One worker means this process. Memory stays bounded: few chunks are under way at any time.

    Raises:
        DataError: of the first faulty line in input order.
        WorkerLostError: a worker died.
    """
    if workers == 1:
        _one_thread_each()
        for chunk in chunks:
            yield chunk, encode_chunk(job, chunk)
        return
    yield from map_in_order(functools.partial(encode_chunk, job), chunks, workers, _start_worker)


def _one_thread_each() -> None:
    # --workers is the measure of parallelism; the library would start threads on every core.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _start_worker() -> None:
    get_logger().setLevel(logging.ERROR)  # the parent has warned already
    _one_thread_each()
