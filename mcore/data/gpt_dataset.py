"""Samples of `seq_length` tokens out of one indexed dataset, in Megatron's order."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from mcore.data.indexed_dataset import IndexedDataset
from mcore.data.masks import document_starts, hidden_mask, reset_positions
from mcore.data.sample_order import Pieces, SampleOrder, build_sample_order
from mcore.data.stable_order import StableOrder
from mcore.errors import DataError

NO_PAD = -1
"""The pad id of a tokenizer without one: no token equals it."""

Sample = dict[str, np.ndarray]
"""`tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [seq_length]; with
`reset_attention_mask` also `is_document_start` (bool)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions:
    """How samples are cut and masked.

    Attributes:
        seq_length: tokens per sample.
        seed: of the order.
        eod_id: end-of-document token.
        pad_id: token without loss; `NO_PAD` = none.
        vocab_size: ids from here on are refused when they are read; None = not checked.
        reset_position_ids: positions restart after every end-of-document token.
        reset_attention_mask: `attention_mask` hides earlier documents, and samples tell where
            documents start.
        eod_mask_loss: no loss where the input is the end-of-document token.
        add_extra_token: read one token more than `seq_length`, so that the last position has a
            label; False leaves the last position without loss.
        drop_last: leave out a last sample that is shorter than the others; False pads it.
        stable: the order of `stable_order` in place of Megatron's.
    """

    seq_length: int
    seed: int
    eod_id: int
    pad_id: int = NO_PAD
    vocab_size: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    add_extra_token: bool = True
    drop_last: bool = True
    stable: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SamplePiece:
    """Part of a sample: tokens [offset, offset + length) of one document of a corpus.

    Documents are numbered as by `mcore data show`: empty ones count, and the sequences (sentences)
    of one are laid end to end. In fine-tuning data a document is a line of the file, from 1.
    """

    prefix: str
    document: int
    offset: int
    length: int


class SampleDataset(Protocol):
    """A numbered set of samples: `GPTDataset` or a blend of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...

    def provenance(self, index: int) -> tuple[SamplePiece, ...]:
        """Where the tokens of a sample come from, in order; reads no tokens."""
        ...

    def attention_mask(self, index: int) -> np.ndarray:
        """What attention must not see, bool [1, s, s], True = hidden."""
        ...

    def document_starts(self, index: int) -> np.ndarray:
        """Positions of a sample where a document begins, int64 [documents]."""
        ...


class GPTDataset:
    """The samples of one split of one corpus.

    For GPT a document is a *sequence* of the indexed dataset. Reading is thread-safe. Arrays that
    are the same for every sample are shared and read-only.

    Args:
        indexed: the corpus.
        documents: the sequence numbers of this split, int [documents].
        num_samples: samples wanted; the corpus is repeated until it holds them, and the data set
            may be longer. None = what one pass over the corpus holds.
        options: how samples are cut and masked.

    Raises:
        DataError: a split without tokens, or one pass that holds no sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: np.ndarray,
        num_samples: int | None,
        options: SampleOptions,
    ) -> None:
        _require_tokens(indexed, documents, num_samples, options)
        self._indexed = indexed
        self._options = options
        self._extra = int(options.add_extra_token)
        self.order: SampleOrder | StableOrder
        if options.stable:
            self.order = StableOrder(
                indexed.sequence_lengths,
                documents,
                seq_length=options.seq_length,
                seed=options.seed,
                extra=self._extra,
            )
            epoch = self.order.samples_per_epoch
            self._length = epoch if num_samples is None else num_samples
        else:
            self.order = build_sample_order(
                indexed.sequence_lengths,
                documents,
                num_samples=num_samples,
                seq_length=options.seq_length,
                seed=options.seed,
                extra=self._extra,
                drop_last=options.drop_last,
            )
            self._length = len(self.order.shuffle_index)
        self._positions = _read_only(np.arange(options.seq_length, dtype=np.int64))
        self._ones = _read_only(np.ones(options.seq_length, np.float32))

    def __len__(self) -> int:
        """The number of samples; it may exceed what was asked for."""
        return self._length

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`.

        Raises:
            IndexError: no such sample.
            DataError: a token id outside the vocabulary.
        """
        options = self._options
        tokens, labels = self._tokens_and_labels(index)
        loss_mask = self._ones
        without_loss = labels == options.pad_id
        if options.eod_mask_loss:
            without_loss |= tokens == options.eod_id
        if without_loss.any():
            loss_mask = np.where(without_loss, np.float32(0), np.float32(1))
        positions = self._positions
        if options.reset_position_ids:
            positions = reset_positions(tokens, options.eod_id)
        starts: np.ndarray | None = None
        if options.reset_attention_mask:
            starts = np.zeros(options.seq_length, np.bool_)
            starts[document_starts(tokens, options.eod_id)] = True
        # The pad id need not be in the vocabulary; the embedding gets an id that is.
        tokens[tokens == options.pad_id] = 0
        labels[labels == options.pad_id] = 0
        sample = {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": positions,
        }
        if starts is not None:
            sample["is_document_start"] = starts
        return sample

    def provenance(self, index: int) -> tuple[SamplePiece, ...]:
        """Where the tokens of a sample come from (its last label included), in order."""
        pieces, prefix = self._pieces(index), self._indexed.path_prefix
        rows = zip(
            pieces.documents.tolist(), pieces.offsets.tolist(), pieces.lengths.tolist(), strict=True
        )
        found = []
        for sequence, offset, length in rows:
            if length > 0:
                document, before = self._indexed.place_in_document(sequence)
                found.append(SamplePiece(prefix, document, before + offset, length))
        return tuple(found)

    def attention_mask(self, index: int) -> np.ndarray:
        """What attention must not see, bool [1, s, s], True = hidden.

        Earlier documents are hidden with `reset_attention_mask`, otherwise just the future.
        """
        tokens, _ = self._tokens_and_labels(index)
        return hidden_mask(
            tokens, self._options.eod_id if self._options.reset_attention_mask else None
        )

    def document_starts(self, index: int) -> np.ndarray:
        """Positions of a sample that follow an end-of-document token, and 0; int64 [documents]."""
        tokens, _ = self._tokens_and_labels(index)
        return document_starts(tokens, self._options.eod_id)

    def _pieces(self, index: int) -> Pieces:
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample {index} of {self._indexed.path_prefix}, which has {len(self)}"
            )
        return self.order.pieces(index)

    def _tokens_and_labels(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Input tokens and labels as they are in the file, pad ids included; int64 [s] each."""
        text = self._read(index)
        if self._extra:
            return text[:-1].copy(), text[1:].copy()
        return text, np.append(text[1:], self._options.pad_id)

    def _read(self, index: int) -> np.ndarray:
        """The tokens of a sample, padded to full length; int64 [s + extra]."""
        pieces = self._pieces(index)
        text = np.empty(self._options.seq_length + self._extra, np.int64)
        end = self._indexed.gather(pieces.documents, pieces.offsets, pieces.lengths, text)
        self._check_vocabulary(text[:end], pieces)
        text[end:] = self._options.pad_id
        return text

    def _check_vocabulary(self, text: np.ndarray, pieces: Pieces) -> None:
        vocab_size = self._options.vocab_size
        if vocab_size is None or not len(text):
            return
        low, high = int(text.min()), int(text.max())
        if low >= 0 and high < vocab_size:
            return
        place = int(text.argmax() if high >= vocab_size else text.argmin())
        number = int(np.searchsorted(np.cumsum(pieces.lengths), place, side="right"))
        document, _ = self._indexed.place_in_document(int(pieces.documents[number]))
        raise DataError(
            f"token id {int(text[place])} in document {document} of {self._indexed.path_prefix} is "
            f"outside the vocabulary of {vocab_size}; the corpus was made with another tokenizer"
        )


def _require_tokens(
    indexed: IndexedDataset, documents: np.ndarray, num_samples: int | None, options: SampleOptions
) -> None:
    """One sample at least, so that repeating the corpus comes to an end."""
    lengths = indexed.sequence_lengths
    tokens = int(lengths[documents].sum(dtype=np.int64))
    wanted = "one pass" if num_samples is None else f"{num_samples} samples"
    if tokens == 0:
        raise DataError(
            f"{wanted} wanted from {indexed.path_prefix}, but the split holds {len(documents)} of "
            f"its {len(indexed)} sequences and no token; give the split a larger share (--split), "
            "or do not ask for it"
        )
    needed = options.seq_length + int(options.add_extra_token)
    repeats = num_samples is not None and not options.stable
    if not repeats and options.drop_last and tokens < needed:
        way_to_repeat = "ask for a number of samples, which repeats it"
        if options.stable:
            way_to_repeat = "the default --data-order with a number of samples, which repeats it"
        raise DataError(
            f"{indexed.path_prefix} is shorter than one sample: {tokens} tokens in the split, and "
            f"--seq-length {options.seq_length} needs {needed}; use a shorter --seq-length or a "
            f"larger corpus, or {way_to_repeat}"
        )


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
