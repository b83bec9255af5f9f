"""What the loss is multiplied by before backward, so that small gradients survive float16.

Scalers live on the device and are updated there: the host never waits for a step's outcome.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mcore.config.optimizer import OptimizerConfig

#: Megatron's factors of growth and backoff; powers of 2 scale exactly.
_GROWTH, _BACKOFF = 2.0, 0.5


class ConstantGradScaler:
    """A loss scale that never changes.

    Args:
        scale: what the loss is multiplied by.
        device: where the scale lives.

    Attributes:
        scale: [1].
        is_stuck: whether the last step overflowed and nothing is left to try, [1]; the caller's to
            judge.
    """

    def __init__(self, scale: float, device: torch.device) -> None:
        self.scale = torch.full((1,), scale, device=device)
        self.is_stuck = torch.zeros(1, dtype=torch.bool, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Take note of a step; nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing that changes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take over: the scale is that of the command line."""


class DynamicGradScaler(ConstantGradScaler):
    """A loss scale that halves on overflow and doubles after a window without one.

    The scale bears `hysteresis` - 1 overflows before it halves. The count is refilled only when the
    scale doubles, so once it is spent every overflow halves (Megatron's rule).

    Args:
        config: initial and lowest scale, window, hysteresis.
        device: where the state lives.
    """

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        super().__init__(config.initial_loss_scale, device)
        self._floor, self._window = config.min_loss_scale, config.loss_scale_window
        self._hysteresis = config.hysteresis
        self._good_steps = torch.zeros(1, dtype=torch.int32, device=device)
        self._left = torch.full((1,), self._hysteresis, dtype=torch.int32, device=device)

    def update(self, found_inf: Tensor) -> None:
        """Take note of a step.

        Args:
            found_inf: one bool: some gradient on some rank was not finite.
        """
        bad = found_inf.reshape(1)
        left = torch.where(bad, self._left - 1, self._left)
        good = torch.where(bad, torch.zeros_like(self._good_steps), self._good_steps + 1)
        self.is_stuck = bad & (left <= 0) & (self.scale <= self._floor)
        lower = (self.scale * _BACKOFF).clamp(min=self._floor)
        scale = torch.where(bad & (left <= 0), lower, self.scale)
        grows = good == self._window
        self.scale = torch.where(grows, scale * _GROWTH, scale)
        self._good_steps = torch.where(grows, torch.zeros_like(good), good)
        self._left = torch.where(grows, torch.full_like(left, self._hysteresis), left)

    def state_dict(self) -> dict[str, Any]:
        """Scale and counters as plain numbers; reads the device."""
        return {
            "scale": float(self.scale),
            "growth_tracker": int(self._good_steps),
            "hysteresis_tracker": int(self._left),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self._good_steps = torch.full_like(self._good_steps, state["growth_tracker"])
        self._left = torch.full_like(self._left, state["hysteresis_tracker"])


def build_grad_scaler(config: OptimizerConfig, device: torch.device) -> ConstantGradScaler:
    """The scaler that the options ask for; a constant 1 without any."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale, device)
    if config.fp16:
        return DynamicGradScaler(config, device)
    return ConstantGradScaler(1.0, device)
