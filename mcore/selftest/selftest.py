"""The parts of the self-test, in order; every rank runs them together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore import parallel_state
from mcore.checkpoint import find_checkpoint, verify
from mcore.selftest.bandwidth import measure
from mcore.selftest.collective_checks import check_group
from mcore.selftest.layouts import (
    STEPS,
    TOLERANCE,
    Layout,
    batch_size,
    differences,
    fitting_layouts,
    reference,
)
from mcore.selftest.tiny_training import Step, TinyTraining
from mcore.topology.collectives import all_gather_object
from mcore.topology.context import ParallelContext
from mcore.training import checkpointing
from mcore.training.checkpoint_writer import CheckpointWriter
from mcore.training.step import settle

#: Kinds of groups that training communicates in: attribute of the context -> axes.
_KINDS = {"tp": "tp", "pp": "pp", "dp": "dp", "mp": "tp-pp", "tp_dp_cp": "tp-dp-cp"}

_STEPS_BEFORE_SAVE, _STEPS_AFTER_SAVE = 2, 2


@dataclass(frozen=True, slots=True)
class CheckedGroups:
    """All groups of one kind at one layout.

    Attributes:
        layout: its name.
        group: the axes.
        size: members of each.
        checks: number of checks on each rank.
        passed: no rank saw a fault.
        slowest: GB/s by collective, of the slowest group.
    """

    layout: str
    group: str
    size: int
    checks: int
    passed: bool
    slowest: dict[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """A layout's training against the reference's.

    Attributes:
        layout: its name.
        loss: largest difference of the loss.
        norm: largest relative difference of the gradient's or the parameters' norm.
        passed: both are within the tolerance.
    """

    layout: str
    loss: float
    norm: float
    passed: bool


@dataclass(frozen=True, slots=True)
class RoundTrip(Compared):
    """Training that went on from a checkpoint against training that went on without one.

    Attributes:
        saved: name of the layout that saved.
    """

    saved: str


@contextmanager
def _initialized(layout: Layout) -> Iterator[ParallelContext]:
    """The groups of a layout."""
    virtual = layout.virtual if layout.virtual > 1 else None
    ctx = parallel_state.initialize_model_parallel(layout.tp, layout.pp, virtual)
    try:
        yield ctx
    finally:
        parallel_state.destroy_model_parallel()


class SelfTest:
    """Everything that is tested; torch.distributed is initialised, model parallelism is not.

    Args:
        world_size: ranks.
        device: where tensors live.
        message_bytes: size of the messages whose bandwidth is measured.

    Attributes:
        faults: what went wrong so far, in words; the same on all ranks if messages arrive.
    """

    def __init__(self, world_size: int, device: torch.device, *, message_bytes: int) -> None:
        self.world_size, self.message_bytes = world_size, message_bytes
        self.faults: list[str] = []
        self._device = device
        with _initialized(Layout()) as ctx:
            self._everyone = ctx.tp_dp_cp  # with data parallelism alone: all ranks
        self.rank = self._everyone.rank
        self._reference: list[Step] = []

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        return all_gather_object(value, self._everyone)

    def collectives(self) -> Iterator[CheckedGroups]:
        """Check and time every kind of group of every layout, each partition of the ranks once."""
        seen = set()
        for layout in fitting_layouts(self.world_size):
            with _initialized(layout) as ctx:
                for field, axes in _KINDS.items():
                    partition = tuple(ctx.layout.groups(axes))
                    if partition in seen or len(partition[0]) == 1:
                        continue
                    seen.add(partition)
                    yield self._check_groups(layout, getattr(ctx, field), axes)

    def _check_groups(self, layout: Layout, group: Any, axes: str) -> CheckedGroups:
        count, own = check_group(group, self._device)
        passed = self._agree(own)
        speeds = self.gather(measure(group, self._device, self.message_bytes))
        names = speeds[0].gigabytes_per_second
        slowest = {
            name: min(speed.gigabytes_per_second[name] for speed in speeds) for name in names
        }
        name = layout.name(self.world_size)
        return CheckedGroups(name, axes, group.size, count, passed, slowest)

    def layouts(self) -> Iterator[Compared]:
        """Train at every layout and compare with one rank that computes everything alone."""
        with parallel_state.use_context(ParallelContext.single()) as alone:
            self._reference = reference(self.world_size, self._device, alone)
        for layout in fitting_layouts(self.world_size):
            with _initialized(layout) as ctx:
                training = self._training(layout.words, ctx)
                steps = [training.step() for _ in range(STEPS)]
            yield self._compare(layout.name(self.world_size), steps, self._reference)

    def round_trips(self, folder: Path) -> Iterator[RoundTrip]:
        """Save at one layout, and go on at it and at another.

        Args:
            folder: empty, and the same for all ranks.
        """
        layouts = fitting_layouts(self.world_size)
        saving = layouts[-1]
        with _initialized(saving) as ctx:
            words = f"{saving.words} --save {folder} --save-interval 100"
            training = self._training(words, ctx)
            for _ in range(_STEPS_BEFORE_SAVE):
                training.step()
            settle(training.state)
            writer = CheckpointWriter(training.config.checkpoint)
            checkpointing.save(training.state, training.config, ctx, writer)
            writer.close()
            wanted = [training.step() for _ in range(_STEPS_AFTER_SAVE)]
        own = verify(find_checkpoint(folder)) if self.rank == 0 else []
        self._agree(own)
        for layout in dict.fromkeys((saving, layouts[0])):
            with _initialized(layout) as ctx:
                training = self._training(f"{layout.words} --load {folder}", ctx)
                checkpointing.load(training.state, training.config, ctx)
                steps = [training.step() for _ in range(_STEPS_AFTER_SAVE)]
            names = [other.name(self.world_size) for other in (saving, layout)]
            found = self._compare(f"{names[0]}, saved, loaded at {names[1]}", steps, wanted)
            yield RoundTrip(names[1], found.loss, found.norm, found.passed, names[0])

    def _training(self, words: str, ctx: ParallelContext) -> TinyTraining:
        return TinyTraining(words, ctx, self._device, batch=batch_size(self.world_size))

    def _compare(self, name: str, steps: list[Step], wanted: list[Step]) -> Compared:
        loss, norm = differences(steps, wanted)
        own = []
        if max(loss, norm) > TOLERANCE:
            own.append(
                f"layout {name}, rank {self.rank}: loss differs by {loss:.2e}, a norm by "
                f"{norm:.2e}; {TOLERANCE:.0e} is allowed"
            )
        passed = self._agree(own)
        worst = [max(values) for values in zip(*self.gather((loss, norm)), strict=True)]
        return Compared(name, worst[0], worst[1], passed)

    def _agree(self, own: list[str]) -> bool:
        """Take up the faults that any rank saw; whether there are none."""
        found = [fault for faults in self.gather(own) for fault in faults]
        self.faults += list(dict.fromkeys([*own, *found]))
        return not (own or found)
