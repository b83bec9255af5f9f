"""A tokenizer.json as Hugging Face writes it, read without transformers."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mcore.errors import ConfigError, DataError
from mcore.tokenizers.base import existing_file, pad_of_its_own, read_json
from mcore.tokenizers.fast_bpe import FastBytePairs, WithFastCore
from mcore.tokenizers.fast_json import fast_core_of_json

TOKENIZER_FILE = "tokenizer.json"
# Later files only fill what earlier ones leave open.
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# The end marks in use, for a bare tokenizer.json, which cannot say which of its tokens is one.
USUAL_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]")


class HuggingFaceTokenizer(WithFastCore):
    """Any tokenizer of the `tokenizers` library, from a local folder or tokenizer.json.

    As in Megatron, special tokens written in the text become their ids, and the tokens that the
    file's own post-processor adds (a leading BOS, for example) are kept. `encode_texts` uses
    tiktoken's core for byte-level BPE where it is sure to give the same ids (see `fast_bpe`).

    The end-of-document token is `eos_token` (else `sep_token`) of the configuration beside the
    file; a bare tokenizer.json may hold exactly one of the usual end tokens.

    Raises:
        DataError: there is no such file, or it is no tokenizer.
        ConfigError: (from `eod`) no end-of-document token is known.
    """

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer

        self._file = _tokenizer_file(path)
        try:
            self._backend = Tokenizer.from_file(self._file)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{self._file} is no tokenizer of `tokenizers`: {error}") from error
        # A file may carry the truncation or padding of its training; a document is never cut.
        self._backend.no_truncation()
        self._backend.no_padding()
        named = _special_tokens(os.path.dirname(self._file))
        ids = {name: self._backend.token_to_id(token) for name, token in named.items()}
        self._eod = ids.get("eos_token", ids.get("sep_token"))
        if self._eod is None and not {"eos_token", "sep_token"} & named.keys():
            self._eod = self._usual_end_token()
        others = [token for name, token in ids.items() if name != "pad_token"]
        self.pad = pad_of_its_own(ids.get("pad_token"), [*others, self._eod])
        # One more than the last id, should the numbering have holes.
        self.vocab_size: int = max(self._backend.get_vocab().values(), default=-1) + 1

    def _usual_end_token(self) -> int | None:
        found = {self._backend.token_to_id(token) for token in USUAL_END_TOKENS} - {None}
        return found.pop() if len(found) == 1 else None

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""
        if self._eod is None:
            raise ConfigError(
                f"{self._file} has no known end-of-document token; name an `eos_token` of its "
                f"vocabulary in {CONFIG_FILES[0]} beside it"
            )
        return self._eod

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self._backend.encode(text).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in order, on the library's threads."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    @functools.cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _added_around(self._backend)

    @property
    def start_ids(self) -> tuple[int, ...]:
        """What the file's post-processor puts before a text."""
        return self._around[0]

    def tokenize_bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text without what the post-processor adds."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _build_fast_core(self) -> FastBytePairs | None:
        return fast_core_of_json(read_json(self._file), self._backend)

    def _files(self) -> str:
        return self._file

    def _dressed(self, ids: np.ndarray) -> np.ndarray:
        start, end = self._around
        return np.concatenate([start, ids, end]).astype(np.int32) if start or end else ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        return self._backend.decode(list(ids), skip_special_tokens=False)


def _added_around(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and behind every text."""
    if backend.num_special_tokens_to_add(False) == 0:
        return (), ()
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return tuple(whole[:at]), tuple(whole[at + len(bare) :])
    return (), ()


def _tokenizer_file(path: str) -> str:
    if os.path.isdir(path):
        path = os.path.join(path, TOKENIZER_FILE)
    elif not os.path.exists(path):
        raise DataError(
            f"--tokenizer-model: there is no {path!r}; give a local folder with {TOKENIZER_FILE}, "
            "or that file (nothing is downloaded)"
        )
    return existing_file(path, "--tokenizer-model")


def _special_tokens(folder: str) -> dict[str, str]:
    """Names such as `eos_token` with the token's text, from the configuration files in a folder."""
    tokens: dict[str, str] = {}
    for name in CONFIG_FILES:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            values: dict[str, Any] = read_json(path)
            for key, value in values.items():
                text = value.get("content") if isinstance(value, dict) else value
                if key.endswith("_token") and isinstance(text, str):
                    tokens.setdefault(key, text)
    return tokens
