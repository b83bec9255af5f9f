"""Where numbers that are not finite begin, seen while a step is computed once more.

Forward hooks look at the output of every module, and at the gradient that reaches it. The first
sighting of a job is found by cause, not by clock: a forward before any backward, then the earliest
micro batch, then the stage that comes first on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore.distributed import DataParallelModule
from mcore.pipeline_parallel.actions import Action
from mcore.topology.collectives import all_gather_object
from mcore.topology.context import ParallelContext
from mcore.topology.param_sharding import global_name


@dataclass(frozen=True, slots=True, order=True)
class Sighting:
    """Numbers that are not finite, at one place; the smallest one came first.

    Attributes:
        is_backward: in a gradient, rather than in an output.
        microbatch: number of the micro batch in the step, of one data-parallel rank.
        way: how far its stage is from where forward or backward begins.
        order: how many sightings and looks the rank had before.
        rank: of the process.
        module: whose output, or the gradient of whose output; layers have their global numbers.
    """

    is_backward: bool
    microbatch: int
    way: int
    order: int
    rank: int
    module: str

    def in_words(self) -> str:
        """One line."""
        what = "gradient of the output" if self.is_backward else "output"
        return f"{what} of {self.module}, micro batch {self.microbatch}, rank {self.rank}"


class Probe:
    """Looks at one step; also the step's observer, which knows the micro batch under way.

    Reading every output on the host is slow. It is for a step that has failed already.

    Args:
        chunks: this rank's model chunks.
        ctx: groups and stages.
    """

    def __init__(self, chunks: Sequence[DataParallelModule], ctx: ParallelContext) -> None:
        self._chunks, self._ctx = chunks, ctx
        self._action: Action | None = None
        self._looks = 0
        self._sightings: list[Sighting] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at everything that the chunks compute within."""
        handles = []
        for number, chunk in enumerate(self._chunks):
            for name, module in chunk.module.named_modules():
                look = self._hook(number, global_name(chunk.module, name) or "the model")
                handles.append(module.register_forward_hook(look))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def waiting(self, action: Action) -> AbstractContextManager[None]:  # noqa: ARG002  (protocol)
        """Nothing."""
        return nullcontext()

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Remember what is under way."""
        self._action = action
        yield
        self._action = None

    def first(self) -> Sighting | None:
        """The first sighting of the job; None where there was none.

        Comm: gathers one object per rank.
        """
        own = min(self._sightings, default=None)
        rows = all_gather_object(all_gather_object(own, self._ctx.mp), self._ctx.dp_cp)
        return min((s for row in rows for s in row if s is not None), default=None)

    def _hook(self, chunk: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            for tensor in _floating(output):
                self._look(chunk, name, tensor, is_backward=False)
                if tensor.requires_grad:
                    tensor.register_hook(gradient)

        def gradient(grad: Tensor) -> None:
            self._look(chunk, name, grad, is_backward=True)

        return look

    def _look(self, chunk: int, name: str, tensor: Tensor, *, is_backward: bool) -> None:
        self._looks += 1
        if self._action is None or bool(torch.isfinite(tensor.detach()).all()):
            return
        placement = self._ctx.placement
        stage = placement.stage(self._ctx.pp.rank, chunk)
        way = placement.num_stages - 1 - stage if is_backward else stage
        self._sightings.append(
            Sighting(is_backward, self._action.microbatch, way, self._looks, self._ctx.rank, name)
        )


def _floating(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _floating(item)
