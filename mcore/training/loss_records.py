"""From what the loss functions of the micro batches return to the loss of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore.topology.collectives import all_reduce_
from mcore.topology.context import ParallelContext
from mcore.training.initialize import Runtime


def reduce_loss(records: Sequence[Any], runtime: Runtime) -> tuple[Tensor, Tensor]:
    """Mean loss and number of valid tokens of the global batch, on every rank.

    op=sum group=dp-cp, then pp (only the last stage has records) dtype=float64 normaliser=valid
    tokens
    """
    ctx: ParallelContext = runtime.ctx
    totals = torch.zeros(2, dtype=torch.float64, device=runtime.device)
    for record in records:
        loss_sum, num_tokens = read_record(record, runtime.device)
        totals += torch.stack([loss_sum.detach().double(), num_tokens.detach().double()])
    all_reduce_(totals, ctx.dp_cp)
    all_reduce_(totals, ctx.pp)
    return totals[0] / totals[1].clamp(min=1.0), totals[1]


def read_record(record: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sum of losses, number of tokens) of a micro batch, on the device.

    A record is `(loss_sum, num_tokens)`, or Megatron's dictionary whose first entry is the reported
    loss: a pair (sum, tokens), or a mean, which counts as one token. They may be Python numbers, or
    tensors of any device.
    """
    if isinstance(record, dict):
        record = next(iter(record.values()))
    if isinstance(record, (tuple, list)):
        loss_sum, num_tokens = record
        return _on(loss_sum, device), _on(num_tokens, device)
    reported = _on(record, device)
    if reported.numel() == 2:
        return reported.flatten()[0], reported.flatten()[1]
    return reported, torch.ones_like(reported)


def _on(number: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        return number.to(device, non_blocking=True)
    # Filled there: a copy would be waited for.
    return torch.full((), float(number), dtype=torch.float64, device=device)
