"""Layouts that fit a number of ranks, and whether they all train alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore.selftest.tiny_training import Step, TinyTraining
from mcore.topology.context import ParallelContext

#: In float64 rounding makes about 1e-13; a fault, however small, makes far more.
TOLERANCE = 1e-9

STEPS = 3

#: A microbatch of the reference, at most.
_REFERENCE_MICRO_BATCH = 16


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to spread the model over all ranks.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        virtual: model chunks a pipeline rank.
        options: further flags.
        label: what the options are called in the table.
    """

    tp: int = 1
    pp: int = 1
    virtual: int = 1
    options: str = ""
    label: str = ""

    def name(self, world_size: int) -> str:
        """Such as `tp2 pp2 dp4 sp`."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": world_size // (self.tp * self.pp)}
        parts = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        parts += [f"vpp{self.virtual}"] if self.virtual > 1 else []
        return " ".join([*parts, *([self.label] if self.label else [])]) or "one rank"

    @property
    def words(self) -> str:
        """Its flags."""
        words = f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp}"
        if self.virtual > 1:
            words += f" --num-virtual-stages-per-pipeline-rank {self.virtual}"
        return f"{words} {self.options}"


_SP = ("--sequence-parallel", "sp")


def fitting_layouts(world_size: int) -> list[Layout]:
    """Every kind of parallelism that this many ranks can have, alone and together."""
    candidates = [Layout()]
    candidates += [
        Layout(
            options=f"--data-parallel-sharding-strategy {name} --overlap-grad-reduce", label=label
        )
        for name, label in (("optim", "zero1"), ("optim_grads", "zero2"))
    ]
    candidates.append(
        Layout(options="--data-parallel-sharding-strategy optim_grads_params", label="zero3")
    )
    candidates += [Layout(2, 1), Layout(3, 1), *(Layout(t, 1, 1, *_SP) for t in (2, 4, 8))]
    candidates += [Layout(1, p) for p in (2, 3, 4)] + [Layout(1, 2, 2)]
    candidates += [Layout(2, 2, 1, *_SP), Layout(4, 2, 1, *_SP), Layout(8, 4, 1, *_SP)]
    candidates.append(
        Layout(2, 2, 2, "--sequence-parallel --use-distributed-optimizer", "sp zero1")
    )
    fitting = []
    for layout in candidates:
        ranks = layout.tp * layout.pp
        shards = "zero" in layout.label
        if world_size % ranks == 0 and not (shards and world_size // ranks == 1):
            fitting.append(layout)
    return fitting


def batch_size(world_size: int) -> int:
    """Samples of a global batch: two microbatches a rank with data parallelism alone."""
    return 2 * world_size


def reference(world_size: int, device: torch.device, ctx: ParallelContext) -> list[Step]:
    """The steps of one rank that has the whole model and the whole batch; no communication.

    Args:
        world_size: ranks, for the size of the batch.
        device: where tensors live.
        ctx: `ParallelContext.single()`, in use.
    """
    batch = batch_size(world_size)
    micro = math.gcd(batch, _REFERENCE_MICRO_BATCH)
    alone = TinyTraining("", ctx, device, batch=batch, micro_batch=micro)
    return [alone.step() for _ in range(STEPS)]


def differences(steps: Sequence[Step], wanted: Sequence[Step]) -> tuple[float, float]:
    """(largest difference of the loss, largest relative difference of a norm)."""
    pairs = list(zip(steps, wanted, strict=True))
    loss = max(_worse(a.loss - b.loss) for a, b in pairs)
    norm = max(
        _worse((x - y) / y)
        for a, b in pairs
        for x, y in ((a.grad_norm, b.grad_norm), (a.params_norm, b.params_norm))
    )
    return loss, norm


def _worse(difference: float) -> float:
    return math.inf if math.isnan(difference) else abs(difference)
