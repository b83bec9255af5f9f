"""Where a step became NaN or infinite: rank, microbatch, and parameter.

A step leaves evidence on the device and nobody waits for it. Only when an update had to be left out
is it read, by all ranks together. Gradients are looked at before they are summed over data-parallel
ranks where that is possible (no overlapped reduction, ZeRO 0 and 1), so that the rank is the one
that made them; afterwards all ranks have them.

What to do about it is not decided here: `find` gives the facts, `refuse` ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mcore.distributed import DataParallelModule
from mcore.errors import NumericsError
from mcore.pipeline_parallel.actions import Action, Kind
from mcore.pipeline_parallel.hooks import Observer
from mcore.topology.collectives import all_gather_object
from mcore.topology.context import ParallelContext

#: So many parameters are named in a message.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A number that is NaN or infinite.

    Attributes:
        kind: the parameter itself, a microbatch's loss, or a parameter's gradient.
        rank: global rank that has it.
        microbatch: number on that rank, from 0; None where only the whole step is known.
        parameter: global name, or None for a loss.
    """

    kind: Literal["parameter", "loss", "gradient"]
    rank: int
    microbatch: int | None
    parameter: str | None


@dataclass(slots=True)
class Evidence:
    """What one step left behind.

    Attributes:
        ctx: groups.
        losses: of each microbatch, before division and scaling, on the ranks that have them.
        gradients: (microbatch or None, names, largest absolute value of each).
        look_again: runs the step's microbatches once more, weights being unchanged, and looks after
            each of them; None = nobody can. Every rank of the job takes part.
    """

    ctx: ParallelContext
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[tuple[int | None, list[str], Tensor]] = field(default_factory=list)
    look_again: Callable[[], Evidence] | None = None

    def note_loss(self, loss: Tensor) -> None:
        """Take down the loss of the next microbatch, in the order of their forwards."""
        self.losses.append(loss.detach())

    def note_gradients(
        self, chunks: Sequence[DataParallelModule], microbatch: int | None = None
    ) -> None:
        """Take down the gradients as they are now: one pass over them, no wait.

        Args:
            chunks: model chunks.
            microbatch: the last one in them; None = all of the step.
        """
        named = [pair for chunk in chunks for pair in _gradients(chunk)]
        if named:
            sizes = torch.stack(torch._foreach_norm([grad for _, grad in named], torch.inf))
            self.gradients.append((microbatch, [name for name, _ in named], sizes))

    def findings(self, chunks: Sequence[DataParallelModule]) -> list[NonFinite]:
        """What is not finite on this rank; waits for the device.

        Args:
            chunks: model chunks, unchanged since the step.
        """
        rank = self.ctx.rank
        found = [
            NonFinite("parameter", rank, None, part.name)
            for chunk in chunks
            for part in chunk.held_parts()
            if not bool(torch.isfinite(part.data).all())
        ]
        found += [
            NonFinite("loss", rank, number, None)
            for number, loss in enumerate(self.losses)
            if not bool(torch.isfinite(loss).all())
        ]
        seen: set[str] = set()  # sums stay infinite: the first microbatch is the one
        for microbatch, names, sizes in self.gradients:
            for name, is_finite in zip(names, torch.isfinite(sizes).tolist(), strict=True):
                if not is_finite and name not in seen:
                    seen.add(name)
                    found.append(NonFinite("gradient", rank, microbatch, name))
        return found


class GradientProbe(Observer):
    """Looks at the gradients after every backward: for a step that is run again to find out.

    Args:
        evidence: takes down what is seen.
        chunks: this rank's model chunks.
        inner: sees every action too.
    """

    def __init__(
        self, evidence: Evidence, chunks: Sequence[DataParallelModule], inner: Observer
    ) -> None:
        self._evidence = evidence
        self._chunks = chunks
        self._inner = inner

    def waiting(self, action: Action) -> AbstractContextManager[None]:
        """Nothing to see."""
        return self._inner.waiting(action)

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Look once the backward is done."""
        with self._inner.running(action):
            yield
        if action.kind is not Kind.FORWARD:
            self._evidence.note_gradients([self._chunks[action.chunk]], action.microbatch)


def can_see_own_gradients(chunk: DataParallelModule) -> bool:
    """Whether a rank's gradients are its own until `start_grad_sync`."""
    options = chunk.ddp_config
    return options.sharding_stage < 2 and not options.overlap_grad_reduce


def find(evidence: Evidence, chunks: Sequence[DataParallelModule]) -> list[NonFinite]:
    """Everything that is not finite on any rank, sorted: parameters, losses, gradients.

    Comm: host-side facts over the tensor- and pipeline-parallel ranks, then the data-parallel ones;
        every rank has to call it.
    """
    own = evidence.findings(chunks)
    of_model = [item for items in all_gather_object(own, evidence.ctx.mp) for item in items]
    everywhere = all_gather_object(of_model, evidence.ctx.dp_cp)
    order = ("parameter", "loss", "gradient")
    return sorted(
        {item for items in everywhere for item in items},
        key=lambda f: (order.index(f.kind), f.microbatch or 0, f.rank, f.parameter or ""),
    )


def find_closely(evidence: Evidence, chunks: Sequence[DataParallelModule]) -> list[NonFinite]:
    """As `find`, and where that tells a gradient's parameter only, with its microbatch.

    For a run that ends here: the step is computed again, over the gradients that are there. Where
    nothing is found then (it was no property of data and weights), the first findings hold.
    """
    found = find(evidence, chunks)
    causes = {item.kind for item in found}
    if causes != {"gradient"} or evidence.look_again is None:
        return found
    again = find(evidence.look_again(), chunks)
    # A sum over ranks that came while one of them looked is known without its microbatch.
    return [item for item in again if item.microbatch is not None] or again or found


def describe(found: Sequence[NonFinite]) -> str:
    """The findings in words; the likeliest cause comes first."""
    parts = []
    weights = _names(found, "parameter")
    if weights:
        parts.append(f"already not finite before the step: {weights}")
    losses = [f"microbatch {f.microbatch} on rank {f.rank}" for f in found if f.kind == "loss"]
    if losses:
        parts.append(f"loss of {_some(losses)}")
    gradients = _names(found, "gradient")
    if gradients:
        parts.append(f"gradient of {gradients}")
    return "; ".join(parts) or "the norm of the gradient overflowed, no single gradient did"


def refuse(iteration: int, found: Sequence[NonFinite], *, was_applied: bool) -> None:
    """End the run.

    Args:
        iteration: of the step.
        found: see `find`.
        was_applied: the gradient was finite and the update was made; only the loss was not.

    Raises:
        NumericsError: always; it says what was found where.
    """
    update = "was made" if was_applied else "was left out"
    raise NumericsError(
        f"iteration {iteration}: NaN or infinity: {describe(found)}. The update {update}, and "
        "nothing was saved since. Go back to an earlier checkpoint, lower the learning rate, or "
        "go on without such updates with --no-check-for-nan-in-loss-and-grad"
    )


def _gradients(chunk: DataParallelModule) -> Iterator[tuple[str, Tensor]]:
    for name, param in chunk.trained_parameters():
        own = param.__dict__.get("main_grad") if can_see_own_gradients(chunk) else None
        grad = own
        if grad is None and (chunk.ddp_config.sharding_stage < 3 or param.grad is not None):
            grad = chunk.own_grad(param)
        if grad is not None and grad.numel():
            yield name, grad


def _names(found: Sequence[NonFinite], kind: str) -> str:
    return _some(
        [
            f"{f.parameter} on rank {f.rank}"
            + ("" if f.microbatch is None else f" from microbatch {f.microbatch}")
            for f in found
            if f.kind == kind
        ]
    )


def _some(items: Sequence[str]) -> str:
    if len(items) <= _NAMED:
        return ", ".join(items)
    return f"{', '.join(items[:_NAMED])} and {len(items) - _NAMED} more"
