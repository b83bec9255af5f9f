"""Typed errors. Every message says what, got, wanted and how to fix it.

Where Megatron asserts or raises RuntimeError for the same mistake the class is one of those as
well, so that code which catches them keeps working.
"""

from __future__ import annotations

from collections.abc import Sequence


class McoreError(Exception):
    """Base of every error that mcore raises for a user, a file or another rank."""


class ConfigError(McoreError, ValueError, AssertionError):
    """An option, or a combination of options, that cannot be right."""


class OptionsError(ConfigError):
    """Several options that cannot be right.

    Attributes:
        problems: each of them in words.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        listed = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(problems, 1))
        super().__init__(f"{len(problems)} problems with the options:\n{listed}")
        self.problems = tuple(problems)


class TopologyError(McoreError, ValueError, RuntimeError):
    """Sizes that do not fit the world, or a group that this rank is not in."""


class NotInitializedError(McoreError, RuntimeError, AssertionError):
    """`initialize_model_parallel` has to be called first."""


class ShapeError(McoreError, ValueError, AssertionError):
    """A tensor whose shape does not fit the operation."""


class ScheduleError(McoreError, RuntimeError):
    """A pipeline plan that is wrong, or that failed while it ran."""


class LostPeerError(ScheduleError):
    """Another rank died, or was silent for longer than the timeout."""


class CheckpointError(McoreError, RuntimeError):
    """A checkpoint that is absent, damaged, incomplete or does not fit the model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not what was written: an older one may still be good."""


class DataError(McoreError, ValueError):
    """A data file or data option that cannot be used."""


class NumericsError(McoreError, ArithmeticError):
    """Numbers that cannot be trained on: not finite, and no remedy is left."""


class TransientNumericsError(NumericsError):
    """Numbers that were not finite, and were when computed again: a fault of the machine."""


class UnsupportedError(McoreError, NotImplementedError):
    """A combination that mcore refuses by name rather than compute wrongly."""
