"""A hash of what a tokenizer does, the same for every file format that it can be stored in."""

from __future__ import annotations

import hashlib

import numpy as np

from mcore.errors import DataError
from mcore.tokenizers.base import Tokenizer

_PROBE = (
    "The quick brown fox, it's 12345 -- na\u00efve \u4f60\u597d \u043f\u0440\u0438\u0432"
    "\n\tdef f(x):  return x**2\r\n  \U0001f600 <|endoftext|> </s> [SEP]"
)
_NUMBERS = "0 1 2 3"


def fingerprint(tokenizer: Tokenizer) -> str:
    """16 hexadecimal digits over the text of every id and the ids of a varied text."""
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {tokenizer.pad}".encode())
    for token in range(tokenizer.vocab_size):
        digest.update(_text(tokenizer, token).encode("utf-8", "replace") + b"\0")
    try:
        ids = tokenizer.tokenize(_PROBE)
    except DataError:  # of a tokenizer that reads numbers only
        ids = tokenizer.tokenize(_NUMBERS) if tokenizer.vocab_size > 3 else []
    digest.update(np.array(ids, np.int64).tobytes())
    return digest.hexdigest()[:16]


def _text(tokenizer: Tokenizer, token: int) -> str:
    try:
        return tokenizer.detokenize([token])
    except (KeyError, IndexError, ValueError):  # a hole in the numbering
        return ""
