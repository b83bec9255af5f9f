"""Tokenizers behind one protocol; each imports its library only when it is built."""

from mcore.tokenizers.base import NO_TOKEN, EncodedTexts, Tokenizer, encode_texts
from mcore.tokenizers.factory import build_tokenizer
from mcore.tokenizers.fingerprint import fingerprint

__all__ = [
    "NO_TOKEN",
    "EncodedTexts",
    "Tokenizer",
    "build_tokenizer",
    "encode_texts",
    "fingerprint",
]
