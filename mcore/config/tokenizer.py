"""Which tokenizer turns text into token ids, and where its files are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

from mcore.config.fields import below, flag, not_one_of, refuse

TokenizerType = Literal[
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
]

# What each type cannot do without; the other file options are no business of that type.
REQUIRED_OPTIONS: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "ByteLevelTokenizer": (),
    "NullTokenizer": ("vocab_size",),
}

#: Of the ByteLevelTokenizer: the bytes, and one id that ends a document.
BYTE_LEVEL_VOCAB_SIZE = 257


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Type, files and special ids of the tokenizer.

    Raises:
        ConfigError: an option that the type needs is absent, or an id lies outside the vocabulary.
    """

    tokenizer_type: TokenizerType | None = flag(
        None, help="Kind of tokenizer. None: the run never needs text or an EOD id.", model=True
    )
    tokenizer_model: str | None = flag(
        None,
        help="SentencePiece .model file; tokenizer.json or its folder (HuggingFaceTokenizer); JSON "
        "rank list (TikTokenizer).",
        metavar="PATH",
        model=True,
    )
    vocab_file: str | None = flag(
        None, help="vocab.json of a GPT2BPETokenizer.", metavar="FILE", model=True
    )
    merge_file: str | None = flag(
        None, help="merges.txt of a GPT2BPETokenizer.", metavar="FILE", model=True
    )
    vocab_size: int | None = flag(
        None,
        help="Number of token ids, before padding. NullTokenizer: required. TikTokenizer: cuts the "
        "rank list. Otherwise the files say it, and a different number here is an error.",
        model=True,
    )
    vocab_extra_ids: int = flag(
        0, help="Sentinel tokens <extra_id_N> that a SentencePieceTokenizer appends.", model=True
    )
    null_tokenizer_eod_id: int | None = flag(
        None, help="End-of-document id of a NullTokenizer; None: vocabulary size - 1.", model=True
    )
    null_tokenizer_pad_id: int = flag(
        -1, help="Padding id of a NullTokenizer; -1: there is none.", model=True
    )
    tiktoken_pattern: Literal["v1", "v2"] = flag(
        "v2", help="Which regular expression cuts text into words before a TikTokenizer's merges."
    )
    tiktoken_num_special_tokens: int = flag(
        1000, help="Ids that a TikTokenizer keeps free for special tokens, before the rank list."
    )
    make_vocab_size_divisible_by: int = flag(
        128, help="The embedding is padded to a multiple of this times the tensor-parallel size."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from self._wrong_type()
        yield from below(self, 1, "vocab_size", "make_vocab_size_divisible_by")
        yield from below(self, 0, "vocab_extra_ids")
        if self.tiktoken_num_special_tokens < 3:
            yield (
                f"tiktoken_num_special_tokens is {self.tiktoken_num_special_tokens}; at least 3 "
                "are needed, for <unk>, <s> and </s>"
            )
        if self.tokenizer_type == "NullTokenizer" and (self.vocab_size or 0) > 0:
            assert self.vocab_size is not None
            yield from self._wrong_null_ids(self.vocab_size)

    def _wrong_type(self) -> Iterator[str]:
        if self.tokenizer_type is None:
            return
        if self.tokenizer_type not in REQUIRED_OPTIONS:
            yield from not_one_of(self.tokenizer_type, get_args(TokenizerType), "tokenizer_type")
            return
        given: dict[str, str | int | None] = {
            "tokenizer_model": self.tokenizer_model,
            "vocab_file": self.vocab_file,
            "merge_file": self.merge_file,
            "vocab_size": self.vocab_size,
        }
        if self.tokenizer_type == "ByteLevelTokenizer" and self.vocab_size is not None:
            yield from not_one_of(self.vocab_size, (BYTE_LEVEL_VOCAB_SIZE,), "vocab_size")
        absent = [name for name in REQUIRED_OPTIONS[self.tokenizer_type] if given[name] is None]
        if absent:
            flags = ", ".join("--" + name.replace("_", "-") for name in absent)
            yield f"{self.tokenizer_type} needs {flags}"

    def _wrong_null_ids(self, size: int) -> Iterator[str]:
        eod, pad = self.null_tokenizer_eod_id, self.null_tokenizer_pad_id
        if eod is not None and not 0 <= eod < size:
            yield f"null_tokenizer_eod_id is {eod}; with vocab_size {size} use 0 to {size - 1}"
        if not -1 <= pad < size:
            yield (
                f"null_tokenizer_pad_id is {pad}; with vocab_size {size} use -1 (none) or 0 to "
                f"{size - 1}"
            )
        if pad == (size - 1 if eod is None else eod):
            yield (
                f"null_tokenizer_pad_id is {pad}, which is the end-of-document id as well: every "
                "document end would be masked from the loss; use -1 or another id"
            )
