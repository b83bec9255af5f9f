"""What a spike is: pure arithmetic on the losses and gradient norms of the last applied steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mcore.config.stability import StabilityConfig

#: MAD x this = standard deviation, for a normal distribution.
_MAD_TO_SIGMA = 1.4826
#: The logarithm of a gradient norm is taken of at least this.
_TINY = 1.0e-30


@dataclass(frozen=True, slots=True)
class Limits:
    """A step above either of them is a spike.

    Attributes:
        loss: highest loss of a normal step.
        grad_norm: highest gradient norm of a normal step.
    """

    loss: float = math.inf
    grad_norm: float = math.inf


class SpikeDetector:
    """Median and MAD over the window of the last applied steps, one limit above for each series.

    A loss is a spike above `m + max(k s, rise |m|)`, with m the median and s = 1.4826 MAD; a
    gradient norm above `exp(m + max(k s, log factor))`, with m and s of its logarithm, since norms
    vary by factors. Only what lies above is a spike: a loss that falls, however fast, is none. Both
    statistics bear up to half of the window being odd, and the least rise keeps a very quiet run
    from calling its noise a spike.

    The limits for a step depend on the steps before it alone, so a device can compare with them
    without the host waiting for it.

    Args:
        config: window, least number of steps, k, least rise, least factor.
    """

    def __init__(self, config: StabilityConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.loss_spike_window)
        self._norms: deque[float] = deque(maxlen=config.loss_spike_window)

    def observe(self, loss: float, grad_norm: float) -> None:
        """Take a step into the window; numbers that are not finite are left out."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._losses.append(loss)
            self._norms.append(math.log(max(grad_norm, _TINY)))

    def limits(self) -> Limits:
        """Limits for the next step; infinite while the window holds too few steps."""
        config = self._config
        if len(self._losses) < config.loss_spike_min_samples:
            return Limits()
        middle, spread = _middle_and_spread(self._losses)
        rise = max(config.loss_spike_threshold * spread, config.loss_spike_min_rise * abs(middle))
        log_norm, log_spread = _middle_and_spread(self._norms)
        log_rise = max(
            config.loss_spike_threshold * log_spread, math.log(config.grad_norm_spike_min_factor)
        )
        return Limits(middle + rise, _exp(log_norm + log_rise))

    def medians(self) -> tuple[float, float] | None:
        """Median loss and gradient norm of the window; None while it is empty."""
        if not self._losses:
            return None
        return median(self._losses), _exp(median(self._norms))

    def state_dict(self) -> dict[str, Any]:
        """The window, as plain numbers."""
        return {"losses": list(self._losses), "log_grad_norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; of a longer window the newest steps stay."""
        size = self._config.loss_spike_window
        self._losses = deque(state.get("losses", ()), maxlen=size)
        self._norms = deque(state.get("log_grad_norms", ()), maxlen=size)


def _middle_and_spread(values: Sequence[float]) -> tuple[float, float]:
    middle = median(values)
    return middle, _MAD_TO_SIGMA * median([abs(value - middle) for value in values])


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700.0 else math.inf
