"""Pretrain a GPT model.

    torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 ...

Without torchrun it runs in one process. All flags: docs/flags.md or --help.
"""

from __future__ import annotations

from mcore import signals

if __name__ == "__main__":  # before torch, whose import takes seconds: a signal may come by then
    signals.install()

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mcore.config.run import RunConfig
from mcore.data.builder import Datasets, build_train_valid_test_datasets
from mcore.data.corpus_meta import TokenizerIdentity
from mcore.data.sft_builder import build_sft_datasets
from mcore.models.gpt import GPTModel
from mcore.tokenizers import build_tokenizer, encode_segments, fingerprint, start_ids
from mcore.training import Stage, corpus_files, pretrain
from mcore.transformer import AttentionMask, DropoutState


def model_provider(config: RunConfig, stage: Stage) -> GPTModel:
    """The part of the model that a pipeline stage holds."""
    assert config.tokenizer.vocab_size is not None
    assert config.max_positions is not None
    return GPTModel(
        config.model,
        vocab_size=config.tokenizer.vocab_size,
        max_sequence_length=config.max_positions,
        pre_process=stage.pre_process,
        post_process=stage.post_process,
        share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
        position_embedding_type=config.gpt.position_embedding_type,
        rotary_percent=config.gpt.rotary_percent,
        rotary_base=config.gpt.rotary_base,
        rotary_scaling=config.gpt.rotary_scaling,
        make_vocab_size_divisible_by=config.tokenizer.make_vocab_size_divisible_by,
        layer_range=stage.layers,
        vp_stage=stage.vp_stage,
        seed=config.training.seed,
    )


def datasets_provider(
    config: RunConfig, sizes: tuple[int | None, int | None, int | None]
) -> Datasets:
    """Training, validation and test data."""
    tokenizer = build_tokenizer(config.tokenizer)
    assert config.training.seq_length is not None
    if config.data.sft:
        return build_sft_datasets(
            config.data,
            sizes=sizes,
            seq_length=config.training.seq_length,
            seed=config.training.seed,
            encode=partial(encode_segments, tokenizer),
            eod_id=tokenizer.eod,
            start_ids=start_ids(tokenizer),
            budget=config.training.max_tokens_per_microbatch,
        )
    return build_train_valid_test_datasets(
        config.data,
        sizes=sizes,
        seq_length=config.training.seq_length,
        seed=config.training.seed,
        eod_id=tokenizer.eod,
        pad_id=tokenizer.pad,
        vocab_size=tokenizer.vocab_size,
        tokenizer=TokenizerIdentity(
            str(config.tokenizer.tokenizer_type),
            tokenizer.vocab_size,
            tokenizer.eod,
            lambda: fingerprint(tokenizer),
        ),
    )


def get_batch(
    data_iterator: Iterator[dict[str, Any]],
) -> tuple[Tensor | None, Tensor | None, AttentionMask, Tensor | None, Tensor | None, DropoutState]:
    """Tokens, positions, attention mask, labels, loss mask, dropout state.

    Tensors are [b, s], and None on middle stages that read no samples; the attention mask is None
    where attention is causal over the whole sequence.
    """
    batch = next(data_iterator)
    return (
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        batch.get("labels"),
        batch.get("loss_mask"),
        batch["dropout_state"],
    )


def loss_func(loss_mask: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor]:
    """(sum of the losses of valid tokens, number of valid tokens) of a micro batch.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output: [b, s], loss of each token.
    """
    assert loss_mask is not None, "only the last stage computes the loss, and it reads the mask"
    total = (output * loss_mask).sum(dtype=torch.float64)
    return total, loss_mask.sum(dtype=torch.float64)


def forward_step(
    data_iterator: Iterator[dict[str, Any]], model: nn.Module
) -> tuple[Tensor, partial[tuple[Tensor, Tensor]]]:
    """Run a micro batch through this stage."""
    tokens, positions, attention_mask, labels, loss_mask, dropout_state = get_batch(data_iterator)
    output = model(tokens, positions, attention_mask, labels=labels, dropout_state=dropout_state)
    return output, partial(loss_func, loss_mask)


def main() -> None:
    """Train from the command line."""
    pretrain(datasets_provider, model_provider, forward_step, data_files=corpus_files)


if __name__ == "__main__":
    main()
