"""Integers written as text: for data that is already tokenized, and for tests."""

from __future__ import annotations

from collections.abc import Sequence

from mcore.errors import DataError
from mcore.tokenizers.base import NO_TOKEN


class NullTokenizer:
    """Reads token ids from decimal numbers separated by white space.

    Args:
        vocab_size: ids 0 to vocab_size - 1 are valid; the end-of-document id is one of them.
        eod_id: end-of-document id; None: vocab_size - 1.
        pad_id: padding id; -1: none.
    """

    def __init__(self, vocab_size: int, eod_id: int | None = None, pad_id: int = NO_TOKEN) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod_id is None else eod_id
        self.pad = pad_id

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text.

        Raises:
            DataError: a word is no integer, or lies outside the vocabulary.
        """
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                f"NullTokenizer reads integers separated by spaces, not text ({error})"
            ) from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise DataError(
                f"token id {wrong} is outside the vocabulary of 0 to {self.vocab_size - 1}; "
                "check --vocab-size"
            )
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, in order."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids in decimal, separated by single spaces."""
        return " ".join(str(i) for i in ids)
