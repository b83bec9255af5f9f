"""Cross entropy over a vocabulary that is dealt to tensor-parallel ranks.

    loss = lse - (1 - e) x_target - e mean(x) + z lse^2,     lse = log(sum_v exp(x_v))

with label smoothing e and z-loss coefficient z, both 0 by default. Tokens are worked on in chunks,
so that float32 logits never exist for all of them, whatever the model's type. Each rank takes its
own largest logit and sum first; two small all-reduces then combine the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mcore.errors import ShapeError
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.topology.collectives import all_reduce, all_reduce_
from mcore.topology.group import Group

#: Elements of a chunk of float32 logits that exist already: 16 MB, little beside them.
CHUNK_ELEMENTS = 4 * 2**20


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Which loss, over which vocabulary.

    Attributes:
        group: tensor-parallel group.
        per_rank: columns of this rank, padding included.
        vocab_size: ids that exist.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        z_loss: coefficient of the squared log of the softmax's denominator.
        chunk_elements: logits that are worked on at a time.
    """

    group: Group
    per_rank: int
    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_elements: int = CHUNK_ELEMENTS

    @property
    def start(self) -> int:
        """First id of this rank."""
        return self.group.rank * self.per_rank

    @property
    def used(self) -> int:
        """Columns of this rank that are not padding."""
        return min(self.per_rank, max(0, self.vocab_size - self.start))

    def own_columns(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each target is this rank's, and its column here (0 elsewhere); [n] each."""
        mine = (target >= self.start) & (target < self.start + self.used)
        return mine, (target - self.start).masked_fill(~mine, 0)

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Runs of tokens whose logits are small enough."""
        step = max(1, self.chunk_elements // max(1, self.per_rank))
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens))


def token_losses(
    logits_of: Callable[[slice], Tensor], target: Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Loss and log of the denominator of each token.

    Args:
        logits_of: this rank's logits [n', used] of a run of tokens, in float32 or wider; a
            temporary that may be overwritten.
        target: [n], ids; negative = left out.
        options: which loss.

    Comm: two all-reduces, of one and of three numbers a token; none alone.
    """
    mine, columns = options.own_columns(target)
    tops, sums = [], []
    for run in options.chunks(target.numel()):
        x = logits_of(run)
        if not options.used:
            tops.append(x.new_full((x.shape[0],), -torch.inf))
            sums.append(x.new_zeros(3, x.shape[0]))
            continue
        top = x.amax(-1)
        picked = x.gather(-1, columns[run].unsqueeze(-1)).squeeze(-1)
        total = x.sum(-1) if options.label_smoothing else torch.zeros_like(top)
        # Subtracting the largest logit keeps every exponential at most 1.
        exponentials = x.sub_(top.unsqueeze(-1)).exp_().sum(-1)
        tops.append(top)
        sums.append(torch.stack([exponentials, picked.masked_fill(~mine[run], 0.0), total]))
        del x  # before the next chunk exists
    own_top, own_sums = torch.cat(tops), torch.cat(sums, dim=1)
    top = all_reduce(own_top, options.group, "max")
    own_sums[0] *= (own_top - top).exp()
    denominator, picked, total = all_reduce_(own_sums, options.group)
    lse = denominator.log() + top
    smoothing = options.label_smoothing
    loss = lse - (1.0 - smoothing) * picked
    if smoothing:
        loss = loss - smoothing / options.vocab_size * total
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    loss = loss.masked_fill(target < 0, 0.0)
    return loss.masked_fill_(target >= options.vocab_size, torch.nan), lse


def logit_gradient(
    x: Tensor, run: slice, target: Tensor, lse: Tensor, grad: Tensor, options: LossOptions
) -> Tensor:
    """Gradient of this rank's logits of a run of tokens, [n', used]; x is overwritten.

    Args:
        x: the logits, [n', used], in float32 or wider.
        run: which tokens.
        target: [n], ids of all tokens.
        lse: [n], log of the denominators.
        grad: [n], gradient of each token's loss.
        options: which loss.
    """
    grad, own_lse = grad[run].masked_fill(target[run] < 0, 0.0), lse[run]
    weight = grad * (1.0 + 2.0 * options.z_loss * own_lse) if options.z_loss else grad
    x = x.sub_(own_lse.unsqueeze(-1)).exp_().mul_(weight.unsqueeze(-1))
    if options.label_smoothing:
        x -= (grad * (options.label_smoothing / options.vocab_size)).unsqueeze(-1)
    if options.used:
        mine, columns = options.own_columns(target[run])
        hit = (grad * (options.label_smoothing - 1.0)).masked_fill(~mine, 0.0)
        x.scatter_add_(-1, columns.unsqueeze(-1), hit.unsqueeze(-1))
    return x


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which a loss of logits of a type is computed."""
    return torch.promote_types(dtype, torch.float32)


class _VocabParallelCrossEntropy(Function):
    """Loss of given logits, which are kept as they are; backward goes through them again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, options: LossOptions) -> Tensor:
        """Losses, [n]; logits are [n, v/t]."""
        loss, lse = token_losses(
            lambda run: _wide_copy(logits[run, : options.used]), target, options
        )
        ctx.save_for_backward(logits, target, lse)
        ctx.options = options
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """Softmax minus the target, times dloss; nothing is communicated."""
        logits, target, lse = ctx.saved_tensors
        options: LossOptions = ctx.options
        grad = torch.empty_like(logits)
        for run in options.chunks(target.numel()):
            x = _wide_copy(logits[run, : options.used])
            grad[run, : options.used] = logit_gradient(x, run, target, lse, grad_output, options)
            del x  # before the next chunk exists
        grad[:, options.used :] = 0
        return grad, None, None


def _wide_copy(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype), copy=True)


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    tp_group: AnyGroup | None = None,
) -> Tensor:
    """Cross entropy of each token, computed without gathering the logits.

    Args:
        vocab_parallel_logits: [..., v/t], any float dtype; not modified.
        target: ids, [...], equal on all ranks. A negative id, such as torch's -100, has loss 0 and
            no gradient.
        label_smoothing: share of the target that is spread evenly over the vocabulary, as torch's.
        z_loss: coefficient of the squared log of the softmax's denominator, which is added.
        vocab_size: ids that exist; columns from here on are padding, take no part in the softmax
            and get no gradient. All columns when None.
        tp_group: tensor-parallel group, this process's own when None.

    Returns:
        [...], float32 (float64 for float64 logits). Where the target is past the vocabulary the
        loss is NaN (torch raises IndexError), never a number that looks like one.

    Comm: forward two all-reduces (one number, then three numbers a token); backward none.

    Raises:
        ShapeError: target does not have the shape of the logits without their last dimension.

    Source: the z-loss is that of Chowdhery et al. 2022 (arXiv:2204.02311) section 5.
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
    options = LossOptions(group, per_rank, limit, label_smoothing, z_loss)
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        vocab_parallel_logits.reshape(-1, per_rank), target.reshape(-1), options
    )
    return loss.view_as(target)
