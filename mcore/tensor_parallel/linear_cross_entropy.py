"""Output layer and cross entropy in one: logits exist for a chunk of tokens at a time only.

The backward multiplies each chunk again, which costs one more product of the output layer and
saves its logits: 4 bytes x tokens x vocabulary / t, and as much again for their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mcore.device import add_product_
from mcore.tensor_parallel.cross_entropy import (
    LossOptions,
    accumulation_dtype,
    logit_gradient,
    token_losses,
)
from mcore.tensor_parallel.linear_function import accumulates_in_main_grad
from mcore.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


class _LinearCrossEntropy(Function):
    """Losses of tokens from hidden states and this rank's rows of the output matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        options: LossOptions,
        accumulates: bool,
    ) -> Tensor:
        """Losses, [n]; hidden states are [n, h], the matrix [v/t, h]."""
        rows = weight[: options.used]
        wide = accumulation_dtype(hidden.dtype)
        loss, lse = token_losses(lambda run: (hidden[run] @ rows.t()).to(wide), target, options)
        ctx.save_for_backward(hidden, weight, target, lse)
        ctx.options = options
        ctx.main_grad = weight.main_grad if accumulates else None  # type: ignore[attr-defined]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Each chunk's logits anew, their gradient, and the two products with it."""
        hidden, weight, target, lse = ctx.saved_tensors
        options: LossOptions = ctx.options
        rows = weight[: options.used]
        wide = accumulation_dtype(hidden.dtype)
        total = ctx.main_grad
        if total is None and ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, dtype=wide, device=weight.device)
        grad_hidden = torch.empty_like(hidden)
        for run in options.chunks(target.numel()):
            x = (hidden[run] @ rows.t()).to(wide)
            grad = logit_gradient(x, run, target, lse, grad_output, options).to(hidden.dtype)
            torch.mm(grad, rows, out=grad_hidden[run])
            if total is not None:
                add_product_(total[: options.used], grad.t(), hidden[run])
        grad_weight = None
        if ctx.needs_input_grad[1] and ctx.main_grad is None:
            assert total is not None
            grad_weight = total.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    target: Tensor,
    options: LossOptions,
    *,
    sequence_parallel: bool,
    gradient_accumulation_fusion: bool,
) -> Tensor:
    """Cross entropy of each token over logits `hidden_states weight^T`.

    Args:
        hidden_states: [s, b, h], or [s/t, b, h] with sequence parallelism.
        weight: [v/t, h], this rank's rows of the output matrix.
        target: ids, [s, b]; negative = left out.
        options: which loss.
        sequence_parallel: gather the hidden states along the sequence.
        gradient_accumulation_fusion: add the weight gradient straight to `weight.main_grad`.

    Returns:
        [s, b], float32 or wider.

    Comm: as a column-parallel output layer followed by `vocab_parallel_cross_entropy`.
    """
    if sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=options.group)
    else:
        hidden_states = copy_to_tensor_model_parallel_region(hidden_states, options.group)
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden_states.flatten(0, 1),
        weight,
        target.reshape(-1),
        options,
        gradient_accumulation_fusion and accumulates_in_main_grad(weight),
    )
    return loss.view_as(target)
