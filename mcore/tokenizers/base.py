"""The one protocol behind which every tokenizer stands."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mcore.errors import DataError

NO_TOKEN = -1
"""The id of a special token that a tokenizer does not have."""


class Tokenizer(Protocol):
    """Text to token ids and back.

    Text is never searched for special tokens unless the class says so: a document that happens to
    contain the characters of an end-of-document mark must not end there.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included, before any padding of the embedding."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token.

        Raises:
            ConfigError: the tokenizer has no such token.
        """

    @property
    def pad(self) -> int:
        """Id of the padding token, or -1 where there is none of its own."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text, without an end-of-document id."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, in order; the fast way where the library has one."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become the replacement character."""


class EncodedTexts(NamedTuple):
    """Texts laid end to end: ids int32 [all tokens], and the tokens of each text int64 [texts]."""

    ids: np.ndarray
    lengths: np.ndarray


@runtime_checkable
class EncodesToArrays(Protocol):
    """A tokenizer that makes arrays without a Python object for every token."""

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """The ids of `tokenize` for each text."""


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> EncodedTexts:
    """Token ids of many texts as arrays, the fast way where the tokenizer has one."""
    if isinstance(tokenizer, EncodesToArrays):
        return tokenizer.encode_texts(texts)
    return lay_end_to_end(tokenizer.tokenize_batch(texts))


@runtime_checkable
class AddsTokens(Protocol):
    """A tokenizer that puts tokens of its own around every text, such as a leading BOS."""

    @property
    def start_ids(self) -> tuple[int, ...]:
        """What it puts before a text."""

    def tokenize_bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text and nothing around them."""


def encode_segments(tokenizer: Tokenizer, texts: Sequence[str]) -> EncodedTexts:
    """As `encode_texts` for parts of larger texts, whose starts are no starts of a text."""
    if isinstance(tokenizer, AddsTokens):
        return lay_end_to_end(tokenizer.tokenize_bare(texts))
    return encode_texts(tokenizer, texts)


def start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before a whole text; mostly nothing."""
    return tokenizer.start_ids if isinstance(tokenizer, AddsTokens) else ()


def lay_end_to_end(rows: Sequence[Sequence[int] | np.ndarray]) -> EncodedTexts:
    """One array of all rows, and their lengths."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    arrays = [np.asarray(row, np.int32) for row in rows]
    ids = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
    return EncodedTexts(ids, lengths)


def existing_file(path: str | None, option: str) -> str:
    """Return `path` if it names a readable file.

    Raises:
        DataError: it does not; the message names `option`, the flag that gave it.
    """
    if path is None or not os.path.isfile(path):
        raise DataError(f"{option}: there is no file {path!r}")
    return path


def read_json(path: str) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: it is no UTF-8 or no JSON; the message names the file.
    """
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except ValueError as error:
        raise DataError(f"{path} is no JSON file: {error}") from error


def pad_of_its_own(pad: int | None, others: Sequence[int | None]) -> int:
    """The padding id, or -1 where it is absent or shared with another special token.

    Labels equal to the padding id are masked from the loss, so a shared id would hide the other
    token from training.
    """
    return NO_TOKEN if pad is None or pad < 0 or pad in others else pad
