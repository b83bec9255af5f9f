"""Byte-pair merges from a JSON rank list, run by tiktoken."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from mcore.errors import ConfigError, DataError
from mcore.tokenizers.base import (
    NO_TOKEN,
    EncodedTexts,
    existing_file,
    lay_end_to_end,
    read_json,
)

# Megatron's default size: longer rank lists are cut there unless --vocab-size says otherwise.
DEFAULT_VOCAB_SIZE = 2**17
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")

# The two word patterns that the rank lists in use were trained with. v1 takes any run of letters
# as a word, v2 also breaks where lower case turns to upper case; both cut numbers into digits.
_NO_WORD = r"[^\r\n\p{L}\p{N}]"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s+(?!\S)|\s+"
PATTERNS = {
    "v1": "|".join(
        (
            rf"{_NO_WORD}?+\p{{L}}+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]",
            _SPACES,
        )
    ),
    "v2": "|".join(
        (
            rf"{_NO_WORD}?[{_UPPER}]*[{_LOWER}]+",
            rf"{_NO_WORD}?[{_UPPER}]+[{_LOWER}]*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            _SPACES,
        )
    ),
}


# Somewhere beyond 400,000 blanks before a word the matcher overflows its stack and the call panics.
_MOST_BLANKS = 300_000
_TOO_MANY_BLANKS = re.compile(rf"\s{{{_MOST_BLANKS}}}")


class TikTokenizer:
    """Special tokens first, then the ranks; `</s>` ends a document.

    Args:
        path: JSON list of {"rank", "token_bytes" (base 64), "token_str"} in order of rank.
        pattern: "v1" or "v2", see `PATTERNS`.
        vocab_size: total size, special tokens included; the rank list is cut to fit. None: the
            whole list, at most 131,072.
        num_special_tokens: ids before the ranks; the first three are `<unk>`, `<s>`, `</s>`.

    Raises:
        DataError: no such file, or it is no rank list; (from encoding) a text with 300,000 blanks
            in a row, which tiktoken cannot read.
        ConfigError: the list is too short for vocab_size.
    """

    pad = NO_TOKEN

    def __init__(
        self, path: str, pattern: str, vocab_size: int | None, num_special_tokens: int
    ) -> None:
        import tiktoken

        ranks = _read_ranks(existing_file(path, "--tokenizer-model"))
        longest = num_special_tokens + len(ranks)
        self.vocab_size = min(longest, DEFAULT_VOCAB_SIZE) if vocab_size is None else vocab_size
        if not num_special_tokens + 256 <= self.vocab_size <= longest:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}; {path} with {num_special_tokens} special tokens "
                f"allows {num_special_tokens + 256} to {longest}"
            )
        ranks = ranks[: self.vocab_size - num_special_tokens]
        names = [*SPECIAL_TOKENS]
        names += [f"<SPECIAL_{i}>" for i in range(len(SPECIAL_TOKENS), num_special_tokens)]
        self._backend = tiktoken.Encoding(
            name=path,
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: i + num_special_tokens for i, token in enumerate(ranks)},
            special_tokens={name: i for i, name in enumerate(names)},
        )
        self.eod = names.index("</s>")

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text; special tokens written in it are ordinary text."""
        if len(text) >= _MOST_BLANKS and _TOO_MANY_BLANKS.search(text):
            raise DataError(
                f"a text with {_MOST_BLANKS} blanks in a row, which tiktoken cannot read; shorten "
                "the run, or leave the text out"
            )
        return self._backend.encode_ordinary(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, in order."""
        return [self.tokenize(text) for text in texts]

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """Token ids of many texts as arrays."""
        return lay_end_to_end(self.tokenize_batch(texts))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        return self._backend.decode(list(ids), errors="replace")


def _read_ranks(path: str) -> list[bytes]:
    entries: list[dict[str, Any]] = read_json(path)
    try:
        ranks = [entry["rank"] for entry in entries]
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} is no list of objects with rank and token_bytes ({error!r})"
        ) from error
    if ranks != list(range(len(ranks))) or tokens[:256] != [bytes([i]) for i in range(256)]:
        raise DataError(f"{path}: ranks must count from 0, and the first 256 be the single bytes")
    return tokens
