"""Where numbers that are not finite begin, seen while a step is computed once more.

Forward hooks look at what goes into every module and what comes out, and at the gradient that
reaches it. The first sighting of a job is found by cause, not by clock: a forward before any
backward, then the earliest micro batch, then the stage that comes first on the way, then the
module. Inputs count since a row-parallel layer's output is a sum over ranks: all of them hold what
one of them has put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Sighting:
    """Numbers that are not finite, at one place.

    Attributes:
        is_backward: in a gradient, rather than in an output.
        microbatch: number of the micro batch in the step, of one data-parallel rank.
        way: how far its stage is from where forward or backward begins.
        order: how many sightings and looks the rank had before.
        rank: of the process.
        what: it is, in words; layers have their global numbers.
    """

    is_backward: bool
    microbatch: int
    way: int
    order: int
    rank: int
    what: str

    @property
    def when(self) -> tuple[bool, int, int, int]:
        """The smallest one came first."""
        return self.is_backward, self.microbatch, self.way, self.order


def in_words(first: Sequence[Sighting]) -> str:
    """One line about sightings that came first, on one rank or on several at once."""
    ranks = ", ".join(str(sighting.rank) for sighting in first)
    word = "rank" if len(first) == 1 else "ranks"
    return f"{first[0].what}, micro batch {first[0].microbatch}, {word} {ranks}"


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
                known = global_name(chunk.module, name) or "the model"
                before = self._before(number, known)
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after(number, known)))
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

    def first(self) -> list[Sighting]:
        """The first sighting of the job, by rank: several had it at once where one made a sum.

        Comm: gathers one object per rank.
        """
        own = min(self._sightings, key=lambda sighting: sighting.when, default=None)
        rows = all_gather_object(all_gather_object(own, self._ctx.mp), self._ctx.dp_cp)
        found = [sighting for row in rows for sighting in row if sighting is not None]
        earliest = min((sighting.when for sighting in found), default=None)
        at_once = {s.rank: s for s in found if s.when == earliest}
        return [at_once[rank] for rank in sorted(at_once)]

    def _before(self, chunk: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, named: Mapping[str, Any]) -> None:
            del module
            for tensor in _floating([*inputs, *named.values()]):
                self._look(chunk, f"input of {name}", tensor, is_backward=False)

        return look

    def _after(self, chunk: int, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            for tensor in _floating(output):
                self._look(chunk, f"output of {name}", tensor, is_backward=False)
                if tensor.requires_grad:
                    tensor.register_hook(gradient)

        def gradient(grad: Tensor) -> None:
            self._look(chunk, f"gradient of the output of {name}", grad, is_backward=True)

        return look

    def _look(self, chunk: int, what: str, tensor: Tensor, *, is_backward: bool) -> None:
        self._looks += 1
        if self._action is None or bool(torch.isfinite(tensor.detach()).all()):
            return
        placement = self._ctx.placement
        stage = placement.stage(self._ctx.pp.rank, chunk)
        way = placement.num_stages - 1 - stage if is_backward else stage
        self._sightings.append(
            Sighting(is_backward, self._action.microbatch, way, self._looks, self._ctx.rank, what)
        )


def _floating(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _floating(item)
