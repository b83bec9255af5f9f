"""What the executor calls at the turning points of a step; from the gradients' owner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mcore.pipeline_parallel.actions import Action


class Observer(Protocol):
    """Sees every action of a step, such as to measure it."""

    def waiting(self, action: Action) -> AbstractContextManager[None]:
        """Around the wait for what the action needs from another rank."""

    def running(self, action: Action) -> AbstractContextManager[None]:
        """Around the action itself."""


class Unobserved:
    """Nobody looks."""

    def waiting(self, action: Action) -> AbstractContextManager[None]:  # noqa: ARG002  (protocol)
        """Nothing."""
        return nullcontext()

    running = waiting


def _no_sync(chunk: int) -> AbstractContextManager[None]:  # noqa: ARG001  (a hook's signature)
    return nullcontext()


def _nothing(argument: int | Tensor) -> None:
    pass


def _unscaled(loss: Tensor) -> Tensor:
    return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleHooks:
    """Callables of a pipeline step; each default does nothing. `chunk` is the rank's chunk number.

    Attributes:
        no_sync: `no_sync(chunk)` gives the context in which all microbatches of the chunk but its
            last one run, forward and backward: gradients are accumulated there, not reduced. Where
            the chunk's last action is a W, the last microbatch runs in it too.
        start_grad_sync: `start_grad_sync(chunk)` after the chunk's last backward or W: all its
            gradients are there, and their reduction may run beside what is left of the pipeline.
        start_param_sync: `start_param_sync(chunk)` before the chunk's first forward of the step.
        finalize_grads: `finalize_grads(num_tokens)` after everything is computed and communicated.
            The gradient of the step is the sum of this rank's gradients divided by the sum of
            num_tokens over data-parallel and pipeline ranks. num_tokens is a float64 scalar: 0 on
            ranks without the loss; with a loss that is a sum, the tokens of this rank's
            microbatches; with a loss that is a mean (already divided by num_microbatches), 1, so
            that the same division gives the mean over data-parallel ranks.
        scale_loss: `scale_loss(loss)` gives what the backward starts from (loss scale).
        observer: sees every action; for profiles and tests.
    """

    no_sync: Callable[[int], AbstractContextManager[None]] = _no_sync
    start_grad_sync: Callable[[int], None] = _nothing
    start_param_sync: Callable[[int], None] = _nothing
    finalize_grads: Callable[[Tensor], None] = _nothing
    scale_loss: Callable[[Tensor], Tensor] = _unscaled
    observer: Observer = Unobserved()
