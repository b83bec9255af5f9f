"""Bytes as tokens: no files, no training, any text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore.config.tokenizer import BYTE_LEVEL_VOCAB_SIZE
from mcore.tokenizers.base import NO_TOKEN, EncodedTexts, lay_end_to_end

NUM_BYTES = 256


class ByteLevelTokenizer:
    """The UTF-8 bytes of the text are its ids; id 256 ends a document.

    The end mark is an id that no byte has, so text with NUL characters survives.
    """

    vocab_size = BYTE_LEVEL_VOCAB_SIZE
    eod = NUM_BYTES
    pad = NO_TOKEN

    def tokenize(self, text: str) -> list[int]:
        """The UTF-8 bytes of one text."""
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, in order."""
        return [self.tokenize(text) for text in texts]

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Token ids of many texts as arrays."""
        return lay_end_to_end([np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts])

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the ids that are bytes; others, such as the end mark, are left out."""
        return bytes(i for i in ids if 0 <= i < NUM_BYTES).decode("utf-8", errors="replace")
