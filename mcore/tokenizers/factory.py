"""From a configuration to its tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from mcore.config.tokenizer import REQUIRED_OPTIONS, TokenizerConfig
from mcore.errors import ConfigError
from mcore.log import warn_ignored
from mcore.tokenizers.base import Tokenizer
from mcore.tokenizers.byte import ByteLevelTokenizer
from mcore.tokenizers.gpt2_bpe import GPT2BPETokenizer
from mcore.tokenizers.huggingface import HuggingFaceTokenizer
from mcore.tokenizers.null import NullTokenizer
from mcore.tokenizers.sentencepiece import (
    GPTSentencePieceTokenizer,
    Llama2Tokenizer,
    SentencePieceTokenizer,
)
from mcore.tokenizers.tiktoken import TikTokenizer


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the tokenizer that a configuration names; only its own library is imported.

    Raises:
        ConfigError: no type is given, or `vocab_size` contradicts the files.
        DataError: a file is absent or damaged.
    """
    if config.tokenizer_type is None:
        raise ConfigError("--tokenizer-type is needed here; for numbers as text use NullTokenizer")
    _warn_of_unused_options(config)
    tokenizer = _BUILDERS[config.tokenizer_type](config)
    if config.vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"--vocab-size is {config.vocab_size}, but {config.tokenizer_type} has "
            f"{tokenizer.vocab_size} tokens; leave the option out"
        )
    return tokenizer


def _warn_of_unused_options(config: TokenizerConfig) -> None:
    kind = config.tokenizer_type
    assert kind is not None
    needed = REQUIRED_OPTIONS[kind]
    files = {
        "tokenizer_model": config.tokenizer_model,
        "vocab_file": config.vocab_file,
        "merge_file": config.merge_file,
    }
    for name, value in files.items():
        if value is not None and name not in needed:
            warn_ignored("--" + name.replace("_", "-"), f"{kind} does not read it")
    if config.vocab_extra_ids and kind != "SentencePieceTokenizer":
        warn_ignored("--vocab-extra-ids", f"{kind} has a fixed vocabulary")
    if kind != "NullTokenizer" and config.null_tokenizer_eod_id is not None:
        warn_ignored("--null-tokenizer-eod-id", f"the tokenizer is a {kind}")
    if kind != "NullTokenizer" and config.null_tokenizer_pad_id != -1:
        warn_ignored("--null-tokenizer-pad-id", f"the tokenizer is a {kind}")


def _gpt2_bpe(config: TokenizerConfig) -> Tokenizer:
    assert config.vocab_file is not None
    assert config.merge_file is not None
    return GPT2BPETokenizer(config.vocab_file, config.merge_file)


def _null(config: TokenizerConfig) -> Tokenizer:
    assert config.vocab_size is not None
    return NullTokenizer(
        config.vocab_size, config.null_tokenizer_eod_id, config.null_tokenizer_pad_id
    )


def _tiktoken(config: TokenizerConfig) -> Tokenizer:
    return TikTokenizer(
        _model(config),
        config.tiktoken_pattern,
        config.vocab_size,
        config.tiktoken_num_special_tokens,
    )


def _model(config: TokenizerConfig) -> str:
    assert config.tokenizer_model is not None
    return config.tokenizer_model


_BUILDERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "GPT2BPETokenizer": _gpt2_bpe,
    "SentencePieceTokenizer": lambda c: SentencePieceTokenizer(_model(c), c.vocab_extra_ids),
    "GPTSentencePieceTokenizer": lambda c: GPTSentencePieceTokenizer(_model(c)),
    "Llama2Tokenizer": lambda c: Llama2Tokenizer(_model(c)),
    "HuggingFaceTokenizer": lambda c: HuggingFaceTokenizer(_model(c)),
    "TikTokenizer": _tiktoken,
    "ByteLevelTokenizer": lambda _: ByteLevelTokenizer(),
    "NullTokenizer": _null,
}
