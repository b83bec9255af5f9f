"""Which rank sits where: pure integer arithmetic, no torch.

A layout is a mixed-radix number system. `order` names the axes from the fastest to the slowest
varying one, so with `tp-cp-dp-pp` neighbouring ranks are neighbours in the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mcore.errors import TopologyError

AXES = ("tp", "cp", "dp", "pp")
DEFAULT_ORDER = "tp-cp-dp-pp"

#: Every kind of group that mcore builds along axes; the keys of `mcore ranks --json`.
AXIS_GROUPS = ("tp", "pp", "cp", "dp", "dp-cp", "tp-pp", "tp-cp", "tp-dp-cp")


@dataclass(frozen=True)
class RankLayout:
    """Sizes of the axes and the order in which ranks run through them.

    Args:
        tp: tensor-parallel size.
        cp: context-parallel size.
        dp: data-parallel size.
        pp: pipeline-parallel size.
        order: axis names from fastest to slowest varying, joined by dashes. An axis of size 1 may
            be left out; `ep` may be named since its size is 1.

    Raises:
        TopologyError: a size below 1, or an order that names an axis twice, an unknown axis, or
            leaves out one whose size is not 1.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise TopologyError(f"{axis} size is {size}; sizes are whole numbers from 1 up")
        names = self.order.split("-")
        known = {*AXES, "ep"}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise TopologyError(
                f"order {self.order!r} names {', '.join(unknown)}; use {', '.join(AXES)}"
            )
        if len(set(names)) != len(names):
            raise TopologyError(f"order {self.order!r} names an axis twice")
        for axis, size in self.sizes.items():
            if size > 1 and axis not in names:
                raise TopologyError(
                    f"order {self.order!r} leaves out {axis}, whose size is {size}; add "
                    f"{axis} to it"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis."""
        return {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis."""
        strides, step = {}, 1
        ordered = [name for name in self.order.split("-") if name in AXES]
        for axis in ordered + [axis for axis in AXES if axis not in ordered]:
            strides[axis] = step
            step *= self.sizes[axis]
        return strides

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a rank along every axis.

        Raises:
            TopologyError: the rank lies outside the world.
        """
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} is outside a world of {self.world_size} ranks")
        return {a: rank // self.strides[a] % self.sizes[a] for a in self.strides}

    def rank(self, **coords: int) -> int:
        """Rank at a position; axes left out are 0."""
        return sum(self.strides[axis] * index for axis, index in coords.items())

    def group_of(self, rank: int, axes: str | Sequence[str]) -> tuple[int, ...]:
        """Ranks that share with `rank` every coordinate but those of `axes` (`"dp-cp"` or list)."""
        wanted = self._split(axes)
        coords = self.coords(rank)
        base = rank - sum(coords[axis] * self.strides[axis] for axis in wanted)
        return tuple(base + offset for offset in self._offsets(wanted))

    def groups(self, axes: str | Sequence[str]) -> list[tuple[int, ...]]:
        """All groups along `axes`, in the order of their first ranks."""
        wanted = self._split(axes)
        offsets = self._offsets(wanted)
        others = [axis for axis in self.strides if axis not in wanted]
        return [tuple(base + o for o in offsets) for base in sorted(self._offsets(others))]

    def embedding_group_of(self, rank: int) -> tuple[int, ...]:
        """First and last stage of the pipeline that `rank` is in (one rank when pp is 1)."""
        pipeline = self.group_of(rank, "pp")
        return (pipeline[0],) if len(pipeline) == 1 else (pipeline[0], pipeline[-1])

    def position_embedding_group_of(self, rank: int) -> tuple[int, ...]:
        """First stage of the pipeline that `rank` is in."""
        return self.group_of(rank, "pp")[:1]

    def named_groups(self) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        """Every kind of group with its members, as `mcore ranks` prints them."""
        for axes in AXIS_GROUPS:
            yield axes, self.groups(axes)
        pipelines = self.groups("pp")
        yield "embedding", [self.embedding_group_of(group[0]) for group in pipelines]
        yield "position-embedding", [group[:1] for group in pipelines]

    def _split(self, axes: str | Sequence[str]) -> list[str]:
        names = axes.split("-") if isinstance(axes, str) else list(axes)
        unknown = [name for name in names if name not in AXES]
        if unknown:
            raise TopologyError(f"unknown axis {', '.join(unknown)}; use {', '.join(AXES)}")
        return [axis for axis in self.strides if axis in names]

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Rank offsets of the members of a group along `axes`, the fastest axis running first."""
        offsets = [0]
        for axis in axes:
            step, size = self.strides[axis], self.sizes[axis]
            offsets = [o + step * i for i in range(size) for o in offsets]
        assert len(offsets) == prod(self.sizes[axis] for axis in axes)
        return offsets


def data_parallel_size(world_size: int, *, tp: int, pp: int, cp: int = 1) -> int:
    """Data-parallel size that fills the world.

    Raises:
        TopologyError: the world does not divide, with the equation and the nearest fits.
    """
    model = tp * pp * cp
    if world_size % model:
        lower, upper = world_size // model * model, (world_size // model + 1) * model
        fits = " or ".join(str(n) for n in (lower, upper) if n)
        raise TopologyError(
            f"world size ({world_size}) must be a multiple of tensor_model_parallel_size ({tp}) x "
            f"pipeline_model_parallel_size ({pp}) x context_parallel_size ({cp}) = {model}; "
            f"start {fits} processes or change the sizes"
        )
    return world_size // model
