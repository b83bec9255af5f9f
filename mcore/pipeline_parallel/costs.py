"""What the simulator is told about time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mcore.errors import ConfigError
from mcore.pipeline_parallel.actions import Action, Kind


@dataclass(frozen=True, slots=True)
class Costs:
    """How long things take, in any unit of time.

    Attributes:
        forward: one forward of a chunk.
        backward: the part of a chunk's backward that gives the input gradient.
        weight: the part that gives the weight gradients.
        communication: one message between two ranks.

    Raises:
        ConfigError: a time that is negative or no number, or forwards or whole backwards that take
            none.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        times = (self.forward, self.backward, self.weight, self.communication)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise ConfigError(
                f"costs are times, 0 or more: got forward {times[0]}, backward {times[1]}, weight "
                f"{times[2]}, communication {times[3]}"
            )
        if self.forward == 0 or self.backward + self.weight == 0:
            raise ConfigError(
                f"a forward ({self.forward}) and a whole backward ({self.backward} + "
                f"{self.weight}) must take some time"
            )

    def of(self, action: Action, split: frozenset[tuple[int, int]] = frozenset()) -> float:
        """The time of an action.

        Args:
            action: of a plan.
            split: the plan's (chunk, microbatch) pairs whose weight gradients are an action of
                their own (`split_backwards`); any other backward includes them.
        """
        if action.kind is Kind.FORWARD:
            return self.forward
        if action.kind is Kind.WEIGHT:
            return self.weight
        if (action.chunk, action.microbatch) in split:
            return self.backward
        return self.backward + self.weight
