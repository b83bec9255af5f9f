"""All that happens to gradients between the last backward and the optimizer, in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore.distributed.data_parallel import DataParallelModule
from mcore.distributed.tied_copies import no_copy_here
from mcore.topology.collectives import all_reduce, all_reduce_, broadcast_
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group


def finalize_model_grads(
    model: Sequence[DataParallelModule],
    num_tokens: Tensor | None = None,
    *,
    loss_denominator: float = 1.0,
    context: ParallelContext | None = None,
) -> None:
    """Make every gradient that of the whole global batch, equal on all ranks that hold a copy.

    | step | op | group | dtype | normaliser |
    |---|---|---|---|---|
    | all gradients | sum | dp-cp | gradient | none |
    | sequence-parallel parameters | sum | tp | gradient | none |
    | rows shared by tensor-parallel ranks | sum | tp | gradient | none |
    | tied embeddings | sum | embedding | gradient | none |
    | number of tokens | broadcast from the last stage, sum | pp, dp-cp | fp64 | none |
    | all gradients | multiply | none | gradient | see `num_tokens` |

    Args:
        model: this rank's model chunks.
        num_tokens: valid tokens in this rank's microbatches, one element, counted on the last stage
            (elsewhere the value does not matter). The gradient is divided by their sum over the
            global batch. None = the mean over data-parallel ranks.
        loss_denominator: what the sum of token losses was divided by before backward (to keep fp16
            in range); it is multiplied back.
        context: groups; the first chunk's by default.

    Comm: as in the table; every rank has to call it.
    """
    context = model[0].context if context is None else context
    for chunk in model:
        chunk.finish_grad_sync()
    _sum_sequence_parallel_grads(model, context.tp)
    _sum_shared_rows(model, context.tp)
    _sum_tied_grads(model, context)
    if num_tokens is not None:
        factor: Tensor | float = loss_denominator / _total_tokens(num_tokens, context)
    else:
        factor = 1.0 / context.dp_cp.size
    if isinstance(factor, Tensor) or factor != 1.0:
        for chunk in model:
            chunk.scale_gradients(factor)


def _total_tokens(num_tokens: Tensor, context: ParallelContext) -> Tensor:
    """Valid tokens of the global batch, at least 1: without any the gradient is zero, not NaN."""
    total = num_tokens.detach().to(torch.float64, copy=True).reshape(())
    broadcast_(total, context.pp, src=context.placement.last_rank)
    return all_reduce_(total, context.dp_cp).clamp(min=1.0)


def _sum_sequence_parallel_grads(model: Sequence[DataParallelModule], group: Group) -> None:
    """Sum gradients that cover a part of the sequence each, in one collective per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for chunk in model:
        for param in chunk.replicas.sequence_parallel:
            grad = chunk.own_grad(param)
            if grad.numel() == 0:  # dealt to other data-parallel ranks, for all of this group
                continue
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for grads in by_dtype.values():
        flat = all_reduce_(torch.cat([grad.flatten() for grad in grads]), group)
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view_as(grad))


def _sum_shared_rows(model: Sequence[DataParallelModule], group: Group) -> None:
    """Sum gradients of replicated rows; every replica takes the same sum, so copies stay equal."""
    for chunk in model:
        if not chunk.replicas.shared_rows:
            continue
        runs = {id(part.param): part.run for part in chunk.own_parts()}
        for rows in chunk.replicas.shared_rows:
            run = runs.get(id(rows.param))
            if run is None:  # data-parallel rank without a part of it, and so its tensor-parallel
                continue  # peers: all of them deal parameters out alike
            grad = chunk.own_grad(rows.param)
            if run.is_whole:
                whole = grad.view(run.shape)
                rows.unpack_(whole, all_reduce_(rows.pack(whole), group))
                continue
            whole = grad.new_zeros(run.shape)
            mine = whole.view(-1)[run.start : run.start + run.numel]
            mine.copy_(grad.view(-1))
            rows.unpack_(whole, all_reduce_(rows.pack(whole), group))
            grad.copy_(mine.view_as(grad))


def _sum_tied_grads(model: Sequence[DataParallelModule], context: ParallelContext) -> None:
    """Sum the gradients of all copies of a parameter: on this rank first, then over the stages.

    Copies are dealt to data-parallel ranks alike, so shards are summed as whole gradients are.
    """
    keys = sorted({key for chunk in model for key in chunk.replicas.tied_keys})
    if not keys:
        return
    copies: dict[str, list[Tensor]] = {key: [] for key in keys}
    for chunk in model:
        for name, param in chunk.trained_parameters():
            if name in copies:
                copies[name].append(chunk.own_grad(param))
    for key in keys:
        if not copies[key]:
            raise no_copy_here(key, context.rank)
        first, *others = copies[key]
        for grad in others:
            first.add_(grad)
        if context.embd is not None and first.numel():
            first.copy_(all_reduce(first, context.embd))
        for grad in others:
            grad.copy_(first)
