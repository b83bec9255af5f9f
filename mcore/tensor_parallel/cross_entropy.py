"""Cross entropy over logits whose vocabulary is dealt to tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mcore.errors import ShapeError
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.topology.collectives import all_reduce_
from mcore.topology.group import as_group

#: The id that torch's own cross entropy leaves out.
_IGNORED = -100


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _used_columns(per_rank: int, rank: int, vocab_size: int) -> int:
    """Columns of this rank that are not padding."""
    return min(per_rank, max(0, vocab_size - rank * per_rank))


class _VocabParallelCrossEntropy(Function):
    """loss = log(sum_v exp(x_v)) - x_target, each rank holding a run of the x_v."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: AnyGroup, vocab_size: int
    ) -> Tensor:
        """Reduce the largest logit, then the sum of exponentials and the target's logit."""
        tp_group = as_group(group)
        per_rank = logits.shape[-1]
        start = tp_group.rank * per_rank
        used = _used_columns(per_rank, tp_group.rank, vocab_size)
        x = logits[..., :used].to(_accumulation_dtype(logits.dtype))
        # Subtracting the largest logit of all ranks keeps every exponential at most 1.
        top = x.amax(-1) if used else x.new_full(x.shape[:-1], -torch.inf)
        all_reduce_(top, tp_group, "max")
        x = x - top.unsqueeze(-1)
        mine = (target >= start) & (target < start + used)
        index = (target - start).masked_fill(~mine, 0).unsqueeze(-1)
        picked = x.gather(-1, index).squeeze(-1) if used else torch.zeros_like(top)
        sums = torch.stack([x.exp_().sum(-1), picked.masked_fill(~mine, 0.0)])
        all_reduce_(sums, tp_group)
        ctx.save_for_backward(x, sums[0], index, mine, target < 0)
        ctx.padding, ctx.dtype = per_rank - used, logits.dtype
        loss = (sums[0].log() - sums[1]).masked_fill_(target < 0, 0.0)
        return loss.masked_fill_(target >= vocab_size, torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """Softmax minus the target's indicator, times dloss; nothing is communicated."""
        exponentials, total, index, mine, ignored = ctx.saved_tensors
        grad_output = grad_output.masked_fill(ignored, 0.0)
        grad = exponentials * (grad_output / total).unsqueeze(-1)
        if grad.shape[-1]:
            minus = grad_output.masked_fill(~mine, 0.0).neg().unsqueeze(-1)
            grad.scatter_add_(-1, index, minus)
        if ctx.padding:
            grad = F.pad(grad, (0, ctx.padding))
        return grad.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    *,
    vocab_size: int | None = None,
    tp_group: AnyGroup | None = None,
) -> Tensor:
    """Cross entropy of each token, computed without gathering the logits.

    Args:
        vocab_parallel_logits: [..., v/t], any float dtype; not modified.
        target: ids, [...], equal on all ranks. A negative id, such as torch's -100, has loss 0 and
            no gradient.
        vocab_size: ids that exist; columns from here on are padding, take no part in the softmax
            and get no gradient. All columns when None.
        tp_group: tensor-parallel group, this process's own when None.

    Returns:
        [...], float32 (float64 for float64 logits). Where the target is past the vocabulary the
        loss is NaN (torch raises IndexError on one CPU rank), never a number that looks like one.

    Comm: forward two all-reduces (one number, then two numbers a token); backward none.

    Raises:
        ShapeError: target does not have the shape of the logits without their last dimension.
    """
    group = tensor_model_parallel_group_or(tp_group)
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ShapeError(
            f"target has shape {list(target.shape)}, logits {list(vocab_parallel_logits.shape)}; "
            "they must agree but for the last dimension of the logits"
        )
    per_rank = vocab_parallel_logits.shape[-1]
    columns = per_rank * group.size
    limit = columns if vocab_size is None else min(vocab_size, columns)
    if group.size == 1:
        logits = vocab_parallel_logits[..., :limit].reshape(-1, limit)
        logits = logits.to(_accumulation_dtype(logits.dtype))
        ids = target.reshape(-1)
        ids = ids.masked_fill(ids < 0, _IGNORED)
        return F.cross_entropy(logits, ids, reduction="none", ignore_index=_IGNORED).view_as(target)
    loss: Tensor = _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, group, limit)
    return loss
