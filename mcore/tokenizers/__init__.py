"""Tokenizers behind one protocol; each imports its library only when it is built."""

from mcore.tokenizers.base import NO_TOKEN, Tokenizer
from mcore.tokenizers.factory import build_tokenizer

__all__ = ["NO_TOKEN", "Tokenizer", "build_tokenizer"]
