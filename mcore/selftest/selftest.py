"""The parts of the self-test, in order; every rank runs them together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore import parallel_state
from mcore.checkpoint import find_checkpoint, verify
from mcore.distributed.sharding_groups import build_sharding_groups, shards_and_replicas
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
from mcore.topology.group import Group
from mcore.training import checkpointing
from mcore.training.checkpoint_writer import CheckpointWriter
from mcore.training.settling import settle

#: Kinds of groups that training communicates in: attribute of the context -> axes.
_KINDS = {"tp": "tp", "pp": "pp", "dp": "dp", "mp": "tp-pp", "tp_dp_cp": "tp-dp-cp"}

#: Copies of the optimizer state with which the groups of hybrid sharding are tried.
_INSTANCES = 2

#: All groups of a kind, by their ranks.
_Partition = tuple[tuple[int, ...], ...]

#: What a kind is called, all its groups, and what gives this rank's, if it is in one.
_Kind = tuple[str, _Partition, Callable[[], Group | None]]

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


def _usual_groups(ctx: ParallelContext) -> Iterator[_Kind]:
    """The groups of the axes, and first with last stage of each pipeline."""
    for field, axes in _KINDS.items():
        yield axes, tuple(ctx.layout.groups(axes)), partial(getattr, ctx, field)
    pipelines = ctx.layout.groups("pp")
    ends = tuple(dict.fromkeys(ctx.layout.embedding_group_of(ranks[0]) for ranks in pipelines))
    yield "embedding", ends, lambda: ctx.embd


def _hybrid_groups(ctx: ParallelContext) -> Iterator[_Kind]:
    """What hybrid sharding makes of the data-parallel ranks."""
    made = functools.cache(lambda: build_sharding_groups(ctx, _INSTANCES))
    shards, replicas = shards_and_replicas(ctx.layout, _INSTANCES)
    yield "dp-shard", tuple(shards), lambda: made().shard
    yield "dp-replica", tuple(replicas), lambda: made().replica


class SelfTest:
    """Everything that is tested; torch.distributed is initialised, model parallelism is not.

    Args:
        world_size: ranks.
        device: where tensors live.
        message_bytes: size of the messages whose bandwidth is measured.
        host: all ranks over gloo, where the device has another backend.

    Attributes:
        faults: what went wrong so far, in words; the same on all ranks if messages arrive.
    """

    def __init__(
        self,
        world_size: int,
        device: torch.device,
        *,
        message_bytes: int,
        host: Group | None = None,
    ) -> None:
        self._host = host
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
        seen: set[_Partition] = set()
        layouts = fitting_layouts(self.world_size)
        copies = [layout for layout in layouts if self._can_be_hybrid(layout)]
        for layout, find in [
            *((layout, _usual_groups) for layout in layouts),
            *((layout, _hybrid_groups) for layout in copies),
        ]:
            with _initialized(layout) as ctx:
                for kind, partition, group in find(ctx):
                    if partition in seen or len(partition[0]) == 1:
                        continue
                    seen.add(partition)
                    where = layout.name(self.world_size)
                    yield self._check_groups(where, kind, group(), self._device)
        if self._host is not None and self._host.size > 1:
            yield self._check_groups("hosts", "gloo", self._host, torch.device("cpu"))

    def _can_be_hybrid(self, layout: Layout) -> bool:
        dp = self.world_size // (layout.tp * layout.pp)
        return dp > _INSTANCES and dp % _INSTANCES == 0

    def _check_groups(
        self, where: str, kind: str, group: Group | None, device: torch.device
    ) -> CheckedGroups:
        """Check the groups of a kind; `group` is this rank's, if it is in one."""
        count, own = (0, []) if group is None else check_group(group, device)
        passed = self._agree(own)
        speed = None if group is None else measure(group, device, self.message_bytes)
        size = 0 if group is None else group.size
        counts, sizes, all_speeds = zip(*self.gather((count, size, speed)), strict=True)
        speeds = [speed.gigabytes_per_second for speed in all_speeds if speed is not None]
        slowest = {name: min(speed[name] for speed in speeds) for name in speeds[0]}
        return CheckedGroups(where, kind, max(sizes), max(counts), passed, slowest)

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
