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

from mcore.training import corpus_files, pretrain
from mcore.training.gpt import datasets_provider, model_provider
from mcore.transformer import AttentionMask, DropoutState


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
