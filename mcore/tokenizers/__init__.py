"""Tokenizers behind one protocol; each imports its library only when it is built."""

from mcore.tokenizers.base import (
    NO_TOKEN,
    EncodedTexts,
    Tokenizer,
    encode_segments,
    encode_texts,
    start_ids,
)
from mcore.tokenizers.factory import build_tokenizer
from mcore.tokenizers.fingerprint import fingerprint
from mcore.tokenizers.huggingface import TOKENIZER_FILE

__all__ = [
    "NO_TOKEN",
    "TOKENIZER_FILE",
    "EncodedTexts",
    "Tokenizer",
    "build_tokenizer",
    "encode_segments",
    "encode_texts",
    "fingerprint",
    "start_ids",
]
