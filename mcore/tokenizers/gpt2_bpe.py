"""GPT-2's byte-level byte-pair encoding from vocab.json and merges.txt."""

from __future__ import annotations

from collections.abc import Sequence

from mcore.errors import ConfigError, DataError
from mcore.tokenizers.base import NO_TOKEN, existing_file
from mcore.tokenizers.fast_bpe import FastBytePairs, WithFastCore, read_merges

END_OF_TEXT = "<|endoftext|>"


class GPT2BPETokenizer(WithFastCore):
    """Byte-level BPE with GPT-2's word pattern; `<|endoftext|>` ends a document.

    The characters `<|endoftext|>` inside a text are ordinary text, as in Megatron. `encode_texts`
    uses tiktoken's core where it is sure to give the same ids (see `fast_bpe`).

    Args:
        vocab_file: vocab.json, token to id.
        merge_file: merges.txt, one merge a line in order of rank.

    Raises:
        DataError: a file is absent or unreadable as what it should be.
        ConfigError: (from `eod`) the vocabulary has no `<|endoftext|>`.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", sec. 2.2.
    """

    pad = NO_TOKEN

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocab_file = existing_file(vocab_file, "--vocab-file")
        merge_file = existing_file(merge_file, "--merge-file")
        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises nothing narrower
            raise DataError(
                f"{vocab_file} and {merge_file} are no BPE vocabulary and merges: {error}"
            ) from error
        self._vocab_file = vocab_file
        self._merge_file = merge_file
        self._backend = Tokenizer(model)
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=True
        )
        self._backend.decoder = decoders.ByteLevel()
        # One more than the last id, should the numbering have holes.
        self.vocab_size: int = max(self._backend.get_vocab().values(), default=-1) + 1

    @property
    def eod(self) -> int:
        """Id of `<|endoftext|>`."""
        token = self._backend.token_to_id(END_OF_TEXT)
        if token is None:
            raise ConfigError(
                f"{self._vocab_file} has no {END_OF_TEXT!r}, which ends a document; "
                "add it to the vocabulary"
            )
        return token

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self._backend.encode(text).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in order, on the library's threads."""
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))]

    def _build_fast_core(self) -> FastBytePairs:
        vocab = self._backend.get_vocab()
        return FastBytePairs(vocab, read_merges(self._merge_file), self._backend)

    def _files(self) -> str:
        return f"{self._vocab_file} and {self._merge_file}"

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, `<|endoftext|>` spelled out."""
        return self._backend.decode(list(ids), skip_special_tokens=False)
