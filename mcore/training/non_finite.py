"""Where a step became NaN or infinite: rank, microbatch, and parameter.

A step leaves evidence on the device and nobody waits for it. Only when an update had to be left out
is it read, by all ranks together. Gradients are looked at before they are summed over data-parallel
ranks where that costs nothing (no overlapped reduction, ZeRO 0 and 1), so that the rank is the one
that made them; elsewhere what is seen is a part of the sum, and the rank only holds it. A step that
is computed again to find out is looked at closely: at every stage each rank sees what it made of
each microbatch.

What to do about it is not decided here: `find` and `look_closely` give the facts, `refuse` ends the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from mcore.distributed import DataParallelModule
from mcore.errors import NumericsError, TransientNumericsError
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
        is_sum: the gradient is summed over data-parallel ranks, any of which may have made it.
    """

    kind: Literal["parameter", "loss", "gradient"]
    rank: int
    microbatch: int | None
    parameter: str | None
    is_sum: bool = False


class _Gradients(NamedTuple):
    """Sizes of gradients at one moment."""

    microbatch: int | None
    names: Sequence[str]
    sizes: Tensor  # largest absolute value of each
    are_sums: bool


@dataclass(slots=True)
class Evidence:
    """What one step left behind.

    Attributes:
        ctx: groups.
        losses: of each microbatch, before division and scaling, on the ranks that have them.
        gradients: what was seen of them, in time.
        look_again: runs the step's microbatches once more, weights being unchanged, and looks after
            each of them; None = nobody can. Every rank of the job takes part.
    """

    ctx: ParallelContext
    losses: list[Tensor] = field(default_factory=list)
    gradients: list[_Gradients] = field(default_factory=list)
    look_again: Callable[[], Evidence] | None = None

    def note_loss(self, loss: Tensor) -> None:
        """Take down the loss of the next microbatch, in the order of their forwards."""
        self.losses.append(loss.detach())

    def note_own_gradients(
        self, chunks: Sequence[DataParallelModule], microbatch: int | None = None
    ) -> None:
        """Take down what this rank has accumulated: one pass over it, no wait.

        Args:
            chunks: model chunks with `main_grad`, of which no reduction has started.
            microbatch: the last one in them; None = all of the step.
        """
        named = [pair for chunk in chunks for pair in _own_gradients(chunk)]
        self._note(microbatch, named, are_sums=False)

    def note_sums(self, chunks: Sequence[DataParallelModule]) -> None:
        """Take down this rank's part of the gradients after their reduction, likewise."""
        named = [pair for chunk in chunks for pair in _reduced_gradients(chunk)]
        self._note(None, named, are_sums=self.ctx.dp_cp.size > 1)

    def note_gradient(self, name: str, grad: Tensor, microbatch: int | None) -> None:
        """Take down one gradient that is on its way into a sum."""
        self._note(microbatch, [(name, grad)], are_sums=False)

    def _note(
        self, microbatch: int | None, named: Sequence[tuple[str, Tensor]], *, are_sums: bool
    ) -> None:
        if named:
            sizes = torch.stack(torch._foreach_norm([grad for _, grad in named], torch.inf))
            names = [name for name, _ in named]
            self.gradients.append(_Gradients(microbatch, names, sizes, are_sums))

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
        for noted in self.gradients:
            are_finite = torch.isfinite(noted.sizes).tolist()
            for name, is_finite in zip(noted.names, are_finite, strict=True):
                if not is_finite and name not in seen:
                    seen.add(name)
                    found.append(
                        NonFinite("gradient", rank, noted.microbatch, name, noted.are_sums)
                    )
        return found


def can_see_own_gradients(chunk: DataParallelModule) -> bool:
    """Whether a rank's gradients are its own until `start_grad_sync`, without holding them back."""
    options = chunk.ddp_config
    return options.sharding_stage < 2 and not options.overlap_grad_reduce


def find(evidence: Evidence, chunks: Sequence[DataParallelModule]) -> list[NonFinite]:
    """Everything that is not finite on any rank, sorted: parameters, losses, gradients.

    A sum of gradients is told only where no rank saw its own to be the cause.

    Comm: host-side facts over the tensor- and pipeline-parallel ranks, then the data-parallel ones;
        every rank has to call it.
    """
    own = evidence.findings(chunks)
    of_model = [item for items in all_gather_object(own, evidence.ctx.mp) for item in items]
    everywhere = all_gather_object(of_model, evidence.ctx.dp_cp)
    found = {item for items in everywhere for item in items}
    if any(item.kind == "gradient" and not item.is_sum for item in found):
        found = {item for item in found if not item.is_sum}
    order = ("parameter", "loss", "gradient")
    return sorted(
        found,
        key=lambda f: (order.index(f.kind), f.microbatch or 0, f.rank, f.parameter or ""),
    )


def broken_weights(chunks: Sequence[DataParallelModule], ctx: ParallelContext) -> str:
    """Names and ranks of parameters that are not finite, in words; empty where all are. As `find`.

    Args:
        chunks: model chunks.
        ctx: groups.
    """
    return _names(find(Evidence(ctx), chunks), "parameter")


class CloseLook(NamedTuple):
    """What was found, and whether it was there when the step was computed again.

    Attributes:
        found: see `find`.
        came_again: None where the step could not be computed again, or nothing is known.
    """

    found: list[NonFinite]
    came_again: bool | None

    def __str__(self) -> str:
        told = {True: "; computed again it was so too", False: "; computed again it was finite"}
        return describe(self.found) + ("" if self.came_again is None else told[self.came_again])


def look_closely(
    evidence: Evidence, chunks: Sequence[DataParallelModule], *, was_applied: bool = False
) -> CloseLook:
    """As `find`, and once more: to tell a transient fault, and rank and microbatch of a gradient.

    For a run that ends here: the step is computed again, over the gradients that are there, unless
    its weights were not finite already or have changed since.

    Args:
        evidence: of the step.
        chunks: model chunks.
        was_applied: the update was made.
    """
    found = find(evidence, chunks)
    has_weights = any(item.kind == "parameter" for item in found)
    if has_weights or was_applied or evidence.look_again is None:
        return CloseLook(found, None)
    again = find(evidence.look_again(), chunks)
    if not again:  # a norm that overflows leaves no other trace
        return CloseLook(found, False if found else None)
    # A loss makes every gradient behind it what it is.
    has_loss = any(item.kind == "loss" for item in found)
    return CloseLook(found if has_loss else again, True)


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
    return "; ".join(parts) or (
        "no single loss or gradient was found; the norm overflowed, or it did not come again"
    )


def refuse(iteration: int, look: CloseLook, *, was_applied: bool) -> NoReturn:
    """End the run.

    Args:
        iteration: of the step.
        look: what was found.
        was_applied: the gradient was finite and the update was made; only the loss was not.

    Raises:
        NumericsError: always; it says what was found where.
        TransientNumericsError: of the two, where the step was finite when computed again.
    """
    update = "was made" if was_applied else "was left out"
    if look.came_again is False:
        raise TransientNumericsError(
            f"iteration {iteration}: NaN or infinity: {look}: a transient fault of a device, its "
            f"memory or a link. The update {update}, and nothing was saved since. The same command "
            "goes on from the last checkpoint; where it comes again, look at that machine"
        )
    raise NumericsError(
        f"iteration {iteration}: NaN or infinity: {look}. The update {update}, and "
        "nothing was saved since. Go back to an earlier checkpoint, lower the learning rate, or "
        "go on without such updates with --no-check-for-nan-in-loss-and-grad"
    )


def _own_gradients(chunk: DataParallelModule) -> Iterator[tuple[str, Tensor]]:
    for name, param in chunk.trained_parameters():
        grad: Tensor = param.main_grad  # type: ignore[attr-defined]
        if grad.numel():
            yield name, grad


def _reduced_gradients(chunk: DataParallelModule) -> Iterator[tuple[str, Tensor]]:
    for name, param in chunk.trained_parameters():
        if chunk.ddp_config.sharding_stage < 3 or param.grad is not None:
            grad = chunk.own_grad(param)
            if grad.numel():
                yield name, grad


def _names(found: Sequence[NonFinite], kind: str) -> str:
    return _some([_place(item) for item in found if item.kind == kind])


def _place(item: NonFinite) -> str:
    if item.is_sum:
        return f"{item.parameter} in rank {item.rank}'s part of the sum over data-parallel ranks"
    where = f"{item.parameter} on rank {item.rank}"
    return where if item.microbatch is None else f"{where} from microbatch {item.microbatch}"


def _some(items: Sequence[str]) -> str:
    if len(items) <= _NAMED:
        return ", ".join(items)
    return f"{', '.join(items[:_NAMED])} and {len(items) - _NAMED} more"
