"""Conjugate pairs of operators between tensor-parallel layouts.

Each operator's backward is the transpose of its forward, so a layer reads like its formula and
autograd does the rest. `t` is the tensor-parallel size. Nothing is communicated when t is 1.
Inputs and gradients are never modified.

| operator | forward | backward |
|---|---|---|
| copy_to | identity | all-reduce |
| reduce_from | all-reduce | identity |
| scatter_to (last dim) | own slice | all-gather |
| gather_from (last dim) | all-gather | own slice |
| scatter_to sequence (first dim) | own slice | all-gather |
| gather_from sequence (first dim) | all-gather | reduce-scatter (or own slice) |
| reduce_scatter_to sequence (first dim) | reduce-scatter | all-gather |

Source: Shoeybi et al. 2019 (arXiv:1909.08053) section 3, operators f and g; Korthikanti et al. 2022
(arXiv:2205.05198) section 4.2.2, g and g-bar.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mcore.errors import ShapeError
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.topology.collectives import (
    all_gather_along_dim,
    all_reduce,
    reduce_scatter_along_dim,
)
from mcore.topology.group import Group, as_group

AnyGroup = Group | dist.ProcessGroup


def _own_slice(x: Tensor, dim: int, group: Group) -> Tensor:
    if x.shape[dim] % group.size:
        raise ShapeError(
            f"dimension {dim} of {list(x.shape)} must be divisible by the tensor-parallel size "
            f"({group.size}, ranks {list(group.ranks)})"
        )
    return x.chunk(group.size, dim)[group.rank].contiguous()


class _CopyToModelParallelRegion(Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: AnyGroup) -> Tensor:
        ctx.group = as_group(group)
        return input_.view_as(input_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_output, as_group(ctx.group)), None


class _ReduceFromModelParallelRegion(Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: AnyGroup) -> Tensor:
        ctx.group = as_group(group)
        return all_reduce(input_, ctx.group).view_as(input_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad_output, None


class _ScatterToModelParallelRegion(Function):
    """Own slice of the last dimension forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: AnyGroup) -> Tensor:
        ctx.group = as_group(group)
        return _own_slice(input_, -1, ctx.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_gather_along_dim(grad_output, -1, as_group(ctx.group)), None


class _GatherFromModelParallelRegion(Function):
    """All-gather along the last dimension forward, own slice backward."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: AnyGroup) -> Tensor:
        ctx.group = as_group(group)
        return all_gather_along_dim(input_, -1, ctx.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return _own_slice(grad_output, -1, as_group(ctx.group)), None


class _ScatterToSequenceParallelRegion(Function):
    """Own slice of the first dimension forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: AnyGroup) -> Tensor:
        ctx.group = as_group(group)
        return _own_slice(input_, 0, ctx.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_gather_along_dim(grad_output, 0, as_group(ctx.group)), None


class _GatherFromSequenceParallelRegion(Function):
    """All-gather along the first dimension forward, reduce-scatter (or own slice) backward."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, group: AnyGroup, tensor_parallel_output_grad: bool = True
    ) -> Tensor:
        ctx.group = as_group(group)
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        return all_gather_along_dim(input_, 0, ctx.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        group = as_group(ctx.group)
        if ctx.tensor_parallel_output_grad:
            return reduce_scatter_along_dim(grad_output, 0, group), None, None
        return _own_slice(grad_output, 0, group), None, None


class _ReduceScatterToSequenceParallelRegion(Function):
    """Reduce-scatter along the first dimension forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: AnyGroup) -> Tensor:
        ctx.group = as_group(group)
        return reduce_scatter_along_dim(input_, 0, ctx.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return all_gather_along_dim(grad_output, 0, as_group(ctx.group)), None


def _apply(function: type[Function], x: Tensor, group: AnyGroup | None, *extra: Any) -> Tensor:
    tp_group = tensor_model_parallel_group_or(group)
    if tp_group.size == 1:
        return x
    result: Tensor = function.apply(x, tp_group, *extra)
    return result


def copy_to_tensor_model_parallel_region(input_: Tensor, group: AnyGroup | None = None) -> Tensor:
    """Hand a replicated tensor to layers of which each rank holds a part.

    Forward  y = x                       Backward  dx = sum over ranks of dy
    Args:    input_: any shape, equal on all ranks. group: tensor-parallel group, ours by default.
    Comm:    forward none; backward one all-reduce of x's bytes.
    Source:  Shoeybi et al. 2019 section 3, operator f.
    """
    return _apply(_CopyToModelParallelRegion, input_, group)


def reduce_from_tensor_model_parallel_region(
    input_: Tensor, group: AnyGroup | None = None
) -> Tensor:
    """Sum partial results of all ranks.

    Forward  y = sum over ranks of x     Backward  dx = dy
    Args:    input_: partial sums, any shape. group: tensor-parallel group, ours by default.
    Comm:    forward one all-reduce of x's bytes; backward none.
    Source:  Shoeybi et al. 2019 section 3, operator g.
    """
    return _apply(_ReduceFromModelParallelRegion, input_, group)


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, group: AnyGroup | None = None
) -> Tensor:
    """Keep this rank's slice of the last dimension.

    Forward  y = x[..., own]             Backward  dx = all-gather of dy
    Args:    input_: [..., h], equal on all ranks. group: tensor-parallel group, ours by default.
    Returns: [..., h/t].
    Raises:  ShapeError: h does not divide by t.
    """
    return _apply(_ScatterToModelParallelRegion, input_, group)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, group: AnyGroup | None = None
) -> Tensor:
    """Put the slices of the last dimension together on every rank.

    Forward  y = all-gather of x         Backward  dx = dy[..., own]
    Args:    input_: [..., h/t]. group: tensor-parallel group, ours by default.
    Returns: [..., h], equal on all ranks.
    """
    return _apply(_GatherFromModelParallelRegion, input_, group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: AnyGroup | None = None) -> Tensor:
    """Keep this rank's part of the sequence.

    Forward  y = x[own]                  Backward  dx = all-gather of dy
    Args:    input_: [s, b, h], equal on all ranks. group: tensor-parallel group, ours by default.
    Returns: [s/t, b, h].
    Raises:  ShapeError: s does not divide by t.
    """
    return _apply(_ScatterToSequenceParallelRegion, input_, group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: AnyGroup | None = None,
) -> Tensor:
    """Put the parts of the sequence together on every rank.

    Forward  y = all-gather of x         Backward  dx = reduce-scatter of dy, or dy[own]
    Args:    input_: [s/t, b, h]. tensor_parallel_output_grad: what follows is tensor parallel, so
             each rank's dy is a part of the sum; False when dy is the same on all ranks.
             group: tensor-parallel group, ours by default.
    Returns: [s, b, h], equal on all ranks.
    Source:  Korthikanti et al. 2022 section 4.2.2, operator g.
    """
    return _apply(_GatherFromSequenceParallelRegion, input_, group, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: AnyGroup | None = None
) -> Tensor:
    """Sum partial results of all ranks and keep this rank's part of the sequence.

    Forward  y_r = (sum_i x_i)[r*s/t : (r+1)*s/t]     Backward  dx = all-gather of dy
    Args:    input_: partial sums, [s, b, h]. group: tensor-parallel group, ours by default.
    Returns: [s/t, b, h], summed in x's dtype.
    Comm:    one reduce-scatter (backward one all-gather) of s*b*h elements.
    Raises:  ShapeError: s does not divide by t.
    Source:  Korthikanti et al. 2022 section 4.2.2, operator g-bar.
    """
    return _apply(_ReduceScatterToSequenceParallelRegion, input_, group)
