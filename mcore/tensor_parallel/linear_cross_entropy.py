"""Output layer and cross entropy in one: logits exist for a chunk of tokens at a time only.

The backward multiplies each chunk again, which costs one more product of the output layer and
saves its logits: 4 bytes x tokens x vocabulary / t, and as much again for their gradient. Where a
pipeline puts the weight gradient off, it is made from the logits once more: another product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from mcore.tensor_parallel.linear_function import (
    WeightGradients,
    accumulate_late,
    accumulates_in_main_grad,
)
from mcore.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

#: float16 ends at 65,504. A power of two: scaling by it rounds nothing but numbers near zero.
_HEADROOM = 2.0**8


def _wide_logits(hidden: Tensor, rows: Tensor) -> Tensor:
    """Logits [n', used] in float32 or wider, also where float16 could not hold them."""
    wide = accumulation_dtype(hidden.dtype)
    if hidden.dtype != torch.float16:
        return (hidden @ rows.t()).to(wide)
    return ((hidden / _HEADROOM) @ rows.t()).to(wide).mul_(_HEADROOM)


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
        weight_gradients: WeightGradients | None,
    ) -> Tensor:
        """Losses, [n]; hidden states are [n, h], the matrix [v/t, h]."""
        rows = weight[: options.used]
        loss, lse = token_losses(lambda run: _wide_logits(hidden[run], rows), target, options)
        ctx.save_for_backward(hidden, weight, target, lse)
        ctx.options = options
        ctx.main_grad = weight.main_grad if accumulates else None  # type: ignore[attr-defined]
        ctx.weight = weight if weight_gradients is not None else None
        ctx.weight_gradients = weight_gradients
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Each chunk's logits anew, their gradient, and the two products with it."""
        hidden, weight, target, lse = ctx.saved_tensors
        saved = _Saved(hidden.detach(), weight.detach(), target, lse, grad_output.detach())
        options: LossOptions = ctx.options
        needs_weight, late = ctx.needs_input_grad[1], None
        if needs_weight and ctx.weight_gradients is not None:
            late = ctx.weight_gradients.work
        total = ctx.main_grad if needs_weight and late is None else None
        if total is None and needs_weight and late is None:
            total = _zeros_like(weight)
        if late is not None:
            late.append(_deferred(saved, options, ctx.weight, ctx.main_grad))
        grad_hidden = torch.empty_like(hidden)
        for run, grad in _logit_gradients(saved, options):
            torch.mm(grad, weight[: options.used], out=grad_hidden[run])
            if total is not None:
                add_product_(total[: options.used], grad.t(), hidden[run])
            del grad  # before the next chunk exists
        grad_weight = None
        if total is not None and ctx.main_grad is None:
            grad_weight = total.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _Saved(NamedTuple):
    """What the gradient of the logits is made from; shapes as in the forward."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    lse: Tensor
    grad_output: Tensor


def _logit_gradients(saved: _Saved, options: LossOptions) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens, and the gradient of their logits, which are made anew."""
    rows = saved.weight[: options.used]

    def gradient(run: slice) -> Tensor:
        x = _wide_logits(saved.hidden[run], rows)
        grad = logit_gradient(x, run, saved.target, saved.lse, saved.grad_output, options)
        return grad.to(saved.hidden.dtype)

    for run in options.chunks(saved.target.numel()):
        yield run, gradient(run)  # kept by the caller alone


def _deferred(
    saved: _Saved, options: LossOptions, weight: Tensor, main_grad: Tensor | None
) -> Callable[[], None]:
    """The weight gradient as a function."""

    def product() -> None:
        total = _zeros_like(weight) if main_grad is None else main_grad
        for run, grad in _logit_gradients(saved, options):
            add_product_(total[: options.used], grad.t(), saved.hidden[run])
            del grad  # before the next chunk exists
        if main_grad is None:
            accumulate_late(weight, total.to(weight.dtype))

    return product


def _zeros_like(weight: Tensor) -> Tensor:
    """Where the gradient of a weight is summed over chunks."""
    wide = accumulation_dtype(weight.dtype)
    return torch.zeros(weight.shape, dtype=wide, device=weight.device)


def linear_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    target: Tensor,
    options: LossOptions,
    *,
    sequence_parallel: bool,
    gradient_accumulation_fusion: bool,
    weight_gradients: WeightGradients | None = None,
) -> Tensor:
    """Cross entropy of each token over logits `hidden_states weight^T`.

    Args:
        hidden_states: [s, b, h], or [s/t, b, h] with sequence parallelism.
        weight: [v/t, h], this rank's rows of the output matrix.
        target: ids, [s, b]; negative = left out.
        options: which loss.
        sequence_parallel: gather the hidden states along the sequence.
        gradient_accumulation_fusion: add the weight gradient straight to `weight.main_grad`.
        weight_gradients: lets a pipeline put it off; only where the weight is a parameter itself.

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
        weight_gradients if weight.is_leaf else None,
    )
    return loss.view_as(target)
