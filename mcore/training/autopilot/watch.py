"""A step's numbers against their limits, on the device and agreed on by all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore.config.stability import StabilityConfig
from mcore.topology.collectives import all_reduce_
from mcore.topology.context import ParallelContext
from mcore.training.autopilot.detector import Limits


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step's numbers were, the same on every rank but for the last bits of the numbers.

    Attributes:
        loss: of the global batch.
        grad_norm: before clipping.
        is_finite: both are.
        is_spike: one is above its limit.
        is_above_threshold: the gradient norm is above `--grad-norm-skip-threshold`.
    """

    loss: float
    grad_norm: float
    is_finite: bool
    is_spike: bool
    is_above_threshold: bool


class Watch:
    """Judges a step between its backward and its update: `judge` is the step's veto.

    Where the loss scale is dynamic, a gradient that is not finite is how the scale finds its place:
    it counts as finite here while the loss is.

    Args:
        config: policy and threshold.
        ctx: who agrees.
        overflows: the loss scale is dynamic.
    """

    def __init__(self, config: StabilityConfig, ctx: ParallelContext, overflows: bool) -> None:
        self._ctx, self._overflows = ctx, overflows
        self._threshold = config.grad_norm_skip_threshold or math.inf
        self._vetoes_spikes = config.loss_spike_policy in ("skip", "rollback")
        self._numbers: Tensor | None = None
        self.limits = Limits()

    def judge(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether the update is to be left out, bool scalar, equal on all ranks.

        Args:
            loss: float64 scalar.
            grad_norm: float64 scalar.

        Comm: an all-reduce of three numbers over tensor- and pipeline-parallel ranks, and one over
            data-parallel ranks: no rank may come to another decision.
        """
        norm_is_finite = torch.isfinite(grad_norm)
        is_bad = ~torch.isfinite(loss)
        if not self._overflows:
            is_bad = is_bad | ~norm_is_finite
        is_spike = (loss > self.limits.loss) | (
            norm_is_finite & (grad_norm > self.limits.grad_norm)
        )
        is_above = norm_is_finite & (grad_norm > self._threshold)
        flags = torch.stack([is_bad, is_spike & ~is_bad, is_above]).double()
        for group in (self._ctx.mp, self._ctx.dp_cp):
            all_reduce_(flags, group, "max")
        self._numbers = torch.cat([flags, torch.stack([loss, grad_norm])])
        vetoes = flags[0] + flags[2] + (flags[1] if self._vetoes_spikes else 0.0)
        return vetoes > 0

    def read(self) -> Finding:
        """What the last step's numbers were; waits for the device."""
        assert self._numbers is not None, "no step has been judged"
        bad, spike, above, loss, norm = self._numbers.tolist()
        return Finding(loss, norm, not bad, bool(spike) and not bad, bool(above))
