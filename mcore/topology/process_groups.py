"""Creates the process groups of a layout, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from mcore.errors import TopologyError
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group
from mcore.topology.placement import StagePlacement
from mcore.topology.rank_layout import RankLayout


def world() -> tuple[int, int]:
    """(world size, rank) of this process; (1, 0) where torch.distributed is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0


def build_context(
    layout: RankLayout,
    *,
    virtual_pipeline_model_parallel_size: int | None = None,
    stage_placement: StagePlacement | None = None,
    timeout: timedelta | None = None,
) -> ParallelContext:
    """Create every group of a layout over the default process group.

    Comm: creates communicators; collective over the whole world. Torch asks every rank to create
    every group in the same order, so each kind is created by one loop over all its groups. A kind
    with the members of an earlier kind shares its communicators: axes of size 1 cost nothing.
    """
    world_size, rank = world()
    if layout.world_size != world_size:
        raise TopologyError(f"{layout} has {layout.world_size} ranks, the world {world_size}")
    if not dist.is_initialized():
        return ParallelContext.single()
    factory = _GroupFactory(rank, timeout)
    layout_groups = {axes: layout.groups(axes) for axes in _AXES_OF_FIELDS.values()}
    groups = {
        field: factory.member(axes, layout_groups[axes], layout.group_of(rank, axes))
        for field, axes in _AXES_OF_FIELDS.items()
    }
    placement = stage_placement or StagePlacement.usual(layout.sizes["pp"])
    first, ends = (placement.first_rank,), sorted({placement.first_rank, placement.last_rank})

    def of_pipeline(pipeline: tuple[int, ...], members: Sequence[int]) -> tuple[int, ...]:
        return tuple(pipeline[index] for index in members)

    pipelines, mine = layout_groups["pp"], layout.group_of(rank, "pp")
    embedding = [of_pipeline(pipeline, ends) for pipeline in pipelines]
    position = [of_pipeline(pipeline, first) for pipeline in pipelines]
    return ParallelContext(
        layout=layout,
        rank=rank,
        embd=factory.optional("embedding", embedding, of_pipeline(mine, ends)),
        pos_embd=factory.optional("position-embedding", position, of_pipeline(mine, first)),
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        stage_placement=stage_placement,
        **groups,
    )


def destroy_groups(context: ParallelContext) -> None:
    """Free the communicators of a context, each once; the default group stays."""
    groups = [getattr(context, field) for field in (*_AXES_OF_FIELDS, "embd", "pos_embd")]
    for handle in {group.handle for group in groups if group is not None}:
        if handle is not None and handle is not dist.group.WORLD and dist.is_initialized():
            dist.destroy_process_group(handle)


_AXES_OF_FIELDS = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "tp_dp_cp": "tp-dp-cp",
}


class _GroupFactory:
    """Makes each kind's rank lists once; all groups of one rank share one communicator.

    Torch asks every rank to enter `new_group` for every group, in one order, because it numbers
    them.
    """

    def __init__(self, rank: int, timeout: timedelta | None) -> None:
        self._rank = rank
        self._timeout = timeout
        self._kinds: set[tuple[tuple[int, ...], ...]] = set()
        # Each rank enters once with itself alone: the numbering stays equal on all ranks, and a
        # group without peers reads nothing that another rank wrote.
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {(rank,): self._new((rank,))}

    def member(self, name: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]) -> Group:
        self._create(groups)
        return Group(name, mine, mine.index(self._rank), self._made[mine])

    def optional(
        self, name: str, groups: list[tuple[int, ...]], mine: tuple[int, ...]
    ) -> Group | None:
        self._create(groups)
        return self.member(name, groups, mine) if self._rank in mine else None

    def _create(self, groups: list[tuple[int, ...]]) -> None:
        """Enter `new_group` for each group of a new kind; collective over the world."""
        kind = tuple(groups)
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        for ranks in groups:
            if len(ranks) == 1:
                continue
            handle = self._new(ranks)
            if self._rank in ranks:
                self._made[ranks] = handle

    def _new(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        whole = dist.group.WORLD
        if whole is not None and 1 < len(ranks) == dist.get_world_size():
            return whole
        handle: dist.ProcessGroup = dist.new_group(list(ranks), timeout=self._timeout)
        return handle
