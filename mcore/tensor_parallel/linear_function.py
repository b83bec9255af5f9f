"""The linear map of the parallel layers, with communication hidden behind matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mcore.device import add_product_
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.topology.collectives import (
    Pending,
    all_gather_along_dim,
    start_all_gather_along_dim,
    start_all_reduce_,
    start_reduce_scatter_along_dim,
)
from mcore.topology.group import Group, as_group


class WeightGradients:
    """When a layer's weight gradients are computed: in its backward, or later by whoever asked.

    Attributes:
        work: None = in the backward; a list = each backward appends its product to it instead.
    """

    __slots__ = ("work",)

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] | None = None


class LinearWithGradAccumulationAndAsyncCommunication(Function):
    """y = x W^T + b, whose backward overlaps communication of dx with the product for dW.

    With sequence parallelism x is this rank's part of the sequence: it is gathered in forward, and
    again in backward rather than kept, while dx = dy W is computed; dx is then reduce-scattered
    while dW is computed. Without it dx is all-reduced while dW is computed.

    Where the data-parallel wrapper gave the weight a `main_grad`, dW is added to it by the same
    matrix product and no weight gradient is returned (see `add_product_` for wider sums).

    Where a pipeline puts dW off (`WeightGradients.work`), backward computes dx only and leaves a
    function that gathers x, computes dW and accumulates it where autograd would have.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  (autograd takes positional arguments only)
        ctx: Any,
        input_: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: AnyGroup,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        gradient_accumulation_fusion: bool,
        weight_gradients: WeightGradients | None,
    ) -> Tensor:
        """Keep x (not the gathered sequence) and W, and multiply."""
        ctx.group = as_group(group)
        ctx.sequence_parallel = sequence_parallel
        ctx.allreduce_dgrad = allreduce_dgrad
        # Under recomputation the saved weight comes back as a plain tensor without `main_grad`.
        ctx.main_grad = weight.main_grad if gradient_accumulation_fusion else None  # type: ignore[attr-defined]
        ctx.weight = weight if weight_gradients is not None else None
        ctx.weight_gradients = weight_gradients
        ctx.has_bias = bias is not None
        ctx.save_for_backward(input_, weight)
        total = all_gather_along_dim(input_, 0, ctx.group) if sequence_parallel else input_
        return F.linear(total, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Start communicating dx, compute dW meanwhile, wait for dx last."""
        input_, weight = ctx.saved_tensors
        group: Group = ctx.group
        # Once: each of the three results would copy a gradient that is not contiguous.
        grad_rows = grad_output.flatten(0, -2)
        needs_input, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        if needs_weight and ctx.weight_gradients is not None:
            work = ctx.weight_gradients.work
            if work is not None:
                needs_weight = False
                work.append(_deferred(ctx, grad_rows.detach(), input_.detach()))

        gathering: Pending | None = None
        if ctx.sequence_parallel and needs_weight:
            gathering = start_all_gather_along_dim(input_, 0, group)
        sending: Pending | None = None
        if needs_input:
            grad_input = grad_rows.mm(weight).view(*grad_output.shape[:-1], weight.shape[1])
            if ctx.sequence_parallel:
                sending = start_reduce_scatter_along_dim(grad_input, 0, group)
            elif ctx.allreduce_dgrad:
                sending = start_all_reduce_(grad_input, group)
            else:
                sending = Pending([], lambda: grad_input)

        grad_weight = grad_bias = None
        if needs_weight:
            total = input_ if gathering is None else gathering.wait()
            grad_weight = _weight_gradient(grad_rows, total, ctx.main_grad)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad_rows.sum(0)
        done = None if sending is None else sending.wait()
        return done, grad_weight, grad_bias, None, None, None, None, None


def _deferred(ctx: Any, grad_rows: Tensor, x: Tensor) -> Callable[[], None]:
    """The product dW as a function; it holds what the product needs, not the graph."""
    weight, main_grad, group = ctx.weight, ctx.main_grad, ctx.group
    gathers = ctx.sequence_parallel

    def product() -> None:
        total = all_gather_along_dim(x, 0, group) if gathers else x
        grad_weight = _weight_gradient(grad_rows, total, main_grad)
        if grad_weight is not None:
            accumulate_late(weight, grad_weight)

    return product


def accumulate_late(weight: Tensor, grad: Tensor) -> None:
    """Add a gradient that was put off to where autograd would have put it."""
    if accumulates_in_main_grad(weight):
        weight.main_grad.add_(grad)  # type: ignore[attr-defined]
    elif weight.grad is None:
        weight.grad = grad
    else:
        weight.grad += grad


def _weight_gradient(rows: Tensor, x: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """Product dW = dy^T x, added straight into `main_grad` where the wrapper asks for it."""
    columns = x.flatten(0, -2)
    if main_grad is None:
        return rows.t().mm(columns)
    add_product_(main_grad, rows.t(), columns)
    return None


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: AnyGroup | None = None,
    *,
    weight_gradients: WeightGradients | None = None,
) -> Tensor:
    """Linear map whose input gradient is communicated while the weight gradient is computed.

    Args:
        input: [s, b, k], or [s/t, b, k] with sequence parallelism.
        weight: [n, k], this rank's part.
        bias: [n] or None.
        gradient_accumulation_fusion: add the weight gradient straight to `weight.main_grad`.
        allreduce_dgrad: all-reduce the input gradient (a column-parallel layer whose input is
            replicated); excludes sequence_parallel.
        sequence_parallel: gather the input along the sequence, reduce-scatter its gradient.
        tp_group: tensor-parallel group, ours by default.
        weight_gradients: lets a pipeline put dW off; only where the weight is a parameter itself,
            not under autocast.

    Returns:
        [s, b, n]; under `torch.autocast` in its dtype, as torch's own linear map.
    """
    group = tensor_model_parallel_group_or(tp_group)
    parallel = group.size > 1
    if torch.is_autocast_enabled(input.device.type):
        # Cast outside of the Function, so that forward, communication and backward use one dtype.
        input, weight = _autocast(input), _autocast(weight)
        bias = None if bias is None else _autocast(bias)
        gradient_accumulation_fusion = False  # the cast weight is not the one with `main_grad`
        weight_gradients = None
    if not weight.is_leaf:
        weight_gradients = None
    result: Tensor = LinearWithGradAccumulationAndAsyncCommunication.apply(
        input,
        weight,
        bias,
        group,
        sequence_parallel and parallel,
        allreduce_dgrad and parallel,
        gradient_accumulation_fusion,
        weight_gradients,
    )
    return result


def _autocast(x: Tensor) -> Tensor:
    """The tensor in the dtype of autocast, which leaves float64 alone."""
    if x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def accumulates_in_main_grad(weight: Tensor) -> bool:
    """Whether the data-parallel wrapper gave this weight a `main_grad` to add its gradient to."""
    return "main_grad" in weight.__dict__
