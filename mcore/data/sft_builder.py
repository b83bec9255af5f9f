"""From the data options to packed fine-tuning data (`--sft`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mcore.config.data import DEFAULT_SPLIT, DataConfig
from mcore.data.blend import Blend, read_blends
from mcore.data.builder import Datasets, Sizes
from mcore.data.conversations import Conversations, Encode, read_conversations
from mcore.data.packed_dataset import PackedConversations
from mcore.data.splits import WHOLE, Bounds, split_bounds, split_range
from mcore.data.token_budget import BudgetedConversations
from mcore.errors import DataError


def build_sft_datasets(
    config: DataConfig,
    *,
    sizes: Sizes,
    seq_length: int,
    seed: int,
    encode: Encode,
    eod_id: int,
    start_ids: Sequence[int] = (),
    budget: int | None = None,
) -> Datasets:
    """Read, tokenize and pack the conversations of the three splits.

    Args:
        config: data paths name files of JSON lines; `split` cuts their conversations.
        sizes: samples wanted of training, validation and test; None = one epoch, 0 = not wanted.
        seq_length: tokens per sample.
        seed: of the order.
        encode: the tokenizer on parts of texts; it adds nothing around them.
        eod_id: its end-of-document id, also used as padding.
        start_ids: what it puts before a whole text, and so before each conversation.
        budget: make training data that is consumed by conversations in rows of so many tokens; the
            other splits are packed to this length.

    Raises:
        DataError: files that cannot be used, or weights.
    """
    blends = read_blends(config)
    bounds: tuple[Bounds | None, ...] = (WHOLE, WHOLE, WHOLE)
    if not config.has_separate_splits:
        bounds = split_bounds(DEFAULT_SPLIT if config.split is None else config.split)
    row_length = seq_length if budget is None else budget
    read: dict[tuple[str, ...], Conversations] = {}

    def build(
        blend: Blend | None, bound: Bounds | None, size: int | None
    ) -> PackedConversations | None:
        if blend is None or bound is None or size == 0:
            return None
        if blend.weights is not None and len(blend.prefixes) > 1:
            raise DataError("--sft reads several files as one; leave the weights out")
        if blend.prefixes not in read:
            read[blend.prefixes] = read_conversations(
                blend.prefixes, encode, eod_id, config.sft_tokenizer_prompt_format, start_ids
            )
        data = read[blend.prefixes]
        chosen = split_range(bound, len(data))
        return PackedConversations(
            data,
            np.arange(chosen.start, chosen.stop),
            size,
            seq_length=row_length,
            seed=seed,
            pad_id=eod_id,
        )

    train, valid, test = (build(*each) for each in zip(blends, bounds, sizes, strict=True))
    if budget is None or train is None:
        return train, valid, test
    blend, bound = blends[0], bounds[0]
    assert blend is not None
    assert bound is not None
    data = read[blend.prefixes]
    chosen = split_range(bound, len(data))
    budgeted = BudgetedConversations(
        data,
        np.arange(chosen.start, chosen.stop),
        sizes[0],
        max_length=seq_length,
        budget=budget,
        seed=seed,
        pad_id=eod_id,
    )
    return budgeted, valid, test
