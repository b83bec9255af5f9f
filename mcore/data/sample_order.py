"""Which tokens are sample k: Megatron's order, as pure functions of lengths and a seed.

The sequences of a split, shuffled and repeated over E epochs, are laid end to end. Unshuffled
sample j is the tokens [j * seq_length, (j + 1) * seq_length + extra) of that stream, so its place
is found by search in cumulative lengths and no sample index is built or stored. Sample k of the
data set is unshuffled sample `shuffle_index[k]`. One legacy NumPy generator, seeded once, deals the
documents and then the samples; its order of use is part of the format.

Source: Megatron-LM's GPT data set.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_SEPARATE_BELOW = 0.80  # Megatron's threshold, as a share of one epoch's samples
_STRIDE = 64  # documents between two stored token counts
_DOCUMENTS_AT_ONCE = _STRIDE << 14


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EpochPlan:
    """How often the corpus is repeated, and whether its last pass is dealt apart.

    Attributes:
        epochs: passes over the corpus.
        separate_final_epoch: less than 80% of the last pass is wanted, so it is shuffled on its
            own: otherwise its documents would crowd out those of the full passes.
        samples_before_final: samples in the passes before the last.
    """

    epochs: int
    separate_final_epoch: bool
    samples_before_final: int


def plan_epochs(
    tokens_per_epoch: int, num_samples: int | None, seq_length: int, extra: int = 1
) -> EpochPlan:
    """The fewest passes that hold `num_samples`.

    Args:
        tokens_per_epoch: tokens of the split; positive.
        num_samples: samples wanted; None = what one pass holds.
        seq_length: tokens a sample advances by.
        extra: 1 where a sample needs one more token for its last label, else 0.
    """
    assert tokens_per_epoch > 0
    tokens_wanted = 0 if num_samples is None else num_samples * seq_length + extra
    epochs = max(1, -(-tokens_wanted // tokens_per_epoch))
    if num_samples is None or epochs == 1:
        return EpochPlan(epochs=1, separate_final_epoch=False, samples_before_final=0)
    before_final = ((epochs - 1) * tokens_per_epoch - extra) // seq_length
    samples_per_epoch = (tokens_per_epoch - extra) // seq_length
    from_final = num_samples - before_final
    assert 0 <= from_final <= samples_per_epoch + 1
    return EpochPlan(
        epochs=epochs,
        separate_final_epoch=from_final < int(_SEPARATE_BELOW * samples_per_epoch),
        samples_before_final=before_final,
    )


def count_samples(
    total_tokens: int, seq_length: int, extra: int = 1, drop_last: bool = True
) -> int:
    """Samples in a stream of tokens.

    Args:
        total_tokens: tokens of all passes.
        seq_length: tokens a sample advances by.
        extra: see `plan_epochs`.
        drop_last: leave out a last sample that is shorter than the others. Keeping it rounds up in
            float32, as Megatron does: beyond 2^24 samples' worth of digits the count may be one
            off.
    """
    if drop_last:
        return max(0, (total_tokens - extra) // seq_length)
    return max(0, int(np.ceil(np.float32(total_tokens - extra) / np.float32(seq_length))))


def document_order(
    documents: np.ndarray, plan: EpochPlan, generator: np.random.RandomState
) -> np.ndarray:
    """The documents of all passes in their dealt order, int32 [epochs * len(documents)]."""
    documents = documents.astype(np.int32)
    if not plan.separate_final_epoch:
        order = np.tile(documents, plan.epochs)
        generator.shuffle(order)
        return order
    order = np.tile(documents, plan.epochs)
    split = (plan.epochs - 1) * len(documents)
    generator.shuffle(order[:split])
    generator.shuffle(order[split:])
    return order


def shuffle_order(
    num_samples: int, plan: EpochPlan, generator: np.random.RandomState
) -> np.ndarray:
    """The unshuffled sample number of every sample, [num_samples] (uint32, int64 from 2^32 - 2)."""
    dtype = np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(num_samples, dtype=dtype)
    if not plan.separate_final_epoch:
        generator.shuffle(order)
        return order
    generator.shuffle(order[: plan.samples_before_final])
    generator.shuffle(order[plan.samples_before_final :])
    return order


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A stretch of the stream, cut at document borders; arrays are [pieces].

    Attributes:
        position: place of the first piece in the document order; the others follow it.
        documents: document numbers, int32.
        offsets: first token in the document, int64.
        lengths: number of tokens, int64; 0 for a document without tokens between two others.
    """

    position: int
    documents: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


class TokenStream:
    """Documents laid end to end, addressed by token; memory is one count per 64 documents.

    Args:
        lengths: tokens of every document of the corpus, [documents].
        order: document numbers in stream order, [stream documents].
    """

    def __init__(self, lengths: np.ndarray, order: np.ndarray) -> None:
        self._lengths = lengths
        self._order = order
        self._starts = _block_starts(lengths, order)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole stream."""
        return int(self._starts[-1])

    def pieces(self, start: int, count: int) -> Pieces:
        """The documents behind tokens [start, start + count), cut short at the end of the stream.

        Args:
            start: first token, 0 <= start.
            count: number of tokens, positive.
        """
        stop = min(start + count, self.num_tokens)
        if stop <= start:
            nothing = np.empty(0, np.int64)
            return Pieces(len(self._order), nothing, nothing, nothing)
        first_block = int(self._starts.searchsorted(start, side="right")) - 1
        last_block = int(self._starts.searchsorted(stop, side="left"))
        position = first_block * _STRIDE
        documents = self._order[position : last_block * _STRIDE]
        sizes = self._lengths[documents]
        ends = sizes.cumsum(dtype=np.int64)
        ends += self._starts[first_block]
        first = int(ends.searchsorted(start, side="right"))
        last = int(ends.searchsorted(stop, side="left")) + 1
        ends = ends[first:last]
        begins = ends - sizes[first:last]
        offsets = np.maximum(start - begins, 0)
        return Pieces(
            position=position + first,
            documents=documents[first:last],
            offsets=offsets,
            lengths=np.minimum(ends, stop) - begins - offsets,
        )


def _block_starts(lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Tokens before every 64th document and after the last, int64 [ceil(documents / 64) + 1]."""
    blocks = -(-len(order) // _STRIDE)
    starts = np.zeros(blocks + 1, np.int64)
    # Lengths lie unaligned in the file, where picking single ones is slow: a copy for the time.
    lengths = np.array(lengths)
    for row in range(0, len(order), _DOCUMENTS_AT_ONCE):
        sizes = lengths.take(order[row : row + _DOCUMENTS_AT_ONCE])
        sums = np.add.reduceat(sizes, np.arange(0, len(sizes), _STRIDE), dtype=np.int64)
        block = row // _STRIDE
        starts[block + 1 : block + 1 + len(sums)] = sums
    np.cumsum(starts, out=starts)
    return starts


@dataclasses.dataclass(frozen=True, slots=True)
class SampleOrder:
    """The whole order of one data set.

    Attributes:
        plan: passes over the corpus.
        document_index: documents in stream order, int32.
        stream: the documents laid end to end.
        shuffle_index: unshuffled number of every sample.
        seq_length: tokens a sample advances by.
        extra: see `plan_epochs`.
    """

    plan: EpochPlan
    document_index: np.ndarray
    stream: TokenStream
    shuffle_index: np.ndarray
    seq_length: int
    extra: int

    def pieces(self, index: int) -> Pieces:
        """The documents behind sample `index` and its last label."""
        start = int(self.shuffle_index[index]) * self.seq_length
        return self.stream.pieces(start, self.seq_length + self.extra)


def build_sample_order(
    lengths: np.ndarray,
    documents: np.ndarray,
    *,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    extra: int = 1,
    drop_last: bool = True,
) -> SampleOrder:
    """Deal the documents and samples of a split.

    Args:
        lengths: tokens of every document of the corpus, [corpus documents].
        documents: the split's document numbers, with at least one token in all.
        num_samples: samples wanted; the order may hold more. None = what one pass holds.
        seq_length: tokens a sample advances by.
        seed: of the legacy NumPy generator.
        extra: see `plan_epochs`.
        drop_last: see `count_samples`.
    """
    tokens_per_epoch = int(lengths[documents].sum(dtype=np.int64))
    plan = plan_epochs(tokens_per_epoch, num_samples, seq_length, extra)
    generator = np.random.RandomState(seed)
    document_index = document_order(documents, plan, generator)
    count = count_samples(plan.epochs * tokens_per_epoch, seq_length, extra, drop_last)
    shuffle_index = shuffle_order(count, plan, generator)
    stream = TokenStream(lengths, document_index)
    return SampleOrder(plan, document_index, stream, shuffle_index, seq_length, extra)
