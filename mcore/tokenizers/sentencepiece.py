"""SentencePiece models in Megatron's three styles: plain GPT, Llama 2, and with added tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mcore.errors import ConfigError, DataError
from mcore.tokenizers.base import EncodedTexts, existing_file, lay_end_to_end, pad_of_its_own


class GPTSentencePieceTokenizer:
    """The model's own pieces and nothing else; its `</s>` ends a document.

    Args:
        model_file: a SentencePiece .model file.

    Raises:
        DataError: there is no such file, or it is no SentencePiece model.
        ConfigError: (from `eod`) the model has no end-of-sentence piece.
    """

    def __init__(self, model_file: str) -> None:
        import sentencepiece

        self._file = existing_file(model_file, "--tokenizer-model")
        self._backend = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._backend.Load(self._file)
        except (RuntimeError, OSError) as error:
            raise DataError(f"{self._file} is no SentencePiece model: {error}") from error
        assert loaded  # the library raises rather than return False
        model = self._backend
        self.pad = pad_of_its_own(model.pad_id(), (model.bos_id(), model.eos_id(), model.unk_id()))

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return self._backend.get_piece_size()

    @property
    def eod(self) -> int:
        """Id of the model's end-of-sentence piece."""
        token = self._backend.eos_id()
        if token < 0:
            raise ConfigError(
                f"{self._file} was trained without an end-of-sentence piece, so it cannot end a "
                "document; use SentencePieceTokenizer, which adds <EOD>"
            )
        return token

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self._backend.encode_as_ids(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`tokenize` of each text, in order."""
        return [self.tokenize(text) for text in texts]

    def encode_texts(self, texts: Sequence[str]) -> EncodedTexts:
        """The ids of `tokenize` for each text, as arrays."""
        return lay_end_to_end([self._as_array(text) for text in texts])

    def _as_array(self, text: str) -> np.ndarray:
        return self._backend.encode_as_numpy(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of piece ids; control pieces have none."""
        return self._backend.decode_ids([int(i) for i in ids])


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """As `GPTSentencePieceTokenizer`, with the model's `<s>` before every text."""

    def __init__(self, model_file: str) -> None:
        super().__init__(model_file)
        self._bos = self._backend.bos_id()
        if self._bos < 0:
            raise ConfigError(
                f"{self._file} has no beginning-of-sentence piece, which Llama2Tokenizer puts "
                "before every text; use GPTSentencePieceTokenizer"
            )

    @property
    def start_ids(self) -> tuple[int, ...]:
        """`<s>`."""
        return (self._bos,)

    def tokenize(self, text: str) -> list[int]:
        """`<s>` and the token ids of one text."""
        return [self._bos, *super().tokenize(text)]

    def tokenize_bare(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text without `<s>`."""
        return [super(Llama2Tokenizer, self).tokenize(text) for text in texts]

    def _as_array(self, text: str) -> np.ndarray:
        return self._backend.encode_as_numpy(text, add_bos=True)


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """A model with BERT's and T5's special tokens added behind its pieces; `<EOD>` ends a document.

    Added where the model lacks them, in Megatron's order: `<CLS>`, `<SEP>`, `<EOD>`, `<MASK>`, the
    model's padding, beginning and end pieces (else `<PAD>`, `<BOS>`, `<EOS>`), `<extra_id_N>`. In
    this style special tokens written in a text become their ids.

    Args:
        model_file: a SentencePiece .model file.
        vocab_extra_ids: number of `<extra_id_N>` tokens.
    """

    def __init__(self, model_file: str, vocab_extra_ids: int = 0) -> None:
        super().__init__(model_file)
        model = self._backend
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        own = (model.pad_id(), "<PAD>"), (model.bos_id(), "<BOS>"), (model.eos_id(), "<EOS>")
        names += [name if token < 0 else model.id_to_piece(token) for token, name in own]
        names += [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]

        pieces = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
        self._special: dict[str, int] = {}
        for name in names:
            self._special[name] = pieces.setdefault(name, len(pieces))
        self._names = {token: name for name, token in self._special.items()}
        self._size = len(pieces)
        self._marks = re.compile("(" + "|".join(map(re.escape, self._special)) + ")")
        self.pad = self._special[names[4]]

    @property
    def vocab_size(self) -> int:
        """Number of pieces and added tokens."""
        return self._size

    @property
    def eod(self) -> int:
        """Id of `<EOD>`."""
        return self._special["<EOD>"]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of one text, special tokens in it recognised."""
        ids: list[int] = []
        for part in self._marks.split(text):
            mark = self._special.get(part)
            ids.extend(self._backend.encode_as_ids(part) if mark is None else (mark,))
        return ids

    def _as_array(self, text: str) -> np.ndarray:
        if self._marks.search(text):
            return np.asarray(self.tokenize(text), np.int32)
        return super()._as_array(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out and set off by spaces."""
        text = ""
        pending: list[int] = []
        for token in map(int, ids):
            if token in self._names:
                text += f"{self._backend.decode_ids(pending)} {self._names[token]} "
                pending = []
            else:
                pending.append(token)
        return text + self._backend.decode_ids(pending)
