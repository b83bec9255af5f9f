"""A run of a tensor's elements in memory order, seen as boxes of the tensor.

Data-parallel sharding deals out flat runs of parameters. The gradient norm and checkpoints think in
boxes of the global tensor: a run of a row-major 2-D tensor is at most three of them (the rest of a
row, whole rows, the beginning of a row).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from mcore.topology.param_sharding import ParamSharding

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements [start, start + numel) of a row-major tensor.

    Attributes:
        shape: shape of the whole tensor: a parameter's tensor-parallel part.
        start: first element.
        numel: number of elements.
    """

    shape: tuple[int, ...]
    start: int
    numel: int

    @classmethod
    def whole(cls, tensor: Tensor) -> FlatRange:
        """All elements of a tensor."""
        return cls(tuple(tensor.shape), 0, tensor.numel())

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.numel == math.prod(self.shape)

    def boxes(self) -> list[Box]:
        """Disjoint boxes that cover the run, in memory order."""
        return list(_boxes(self.shape, self.start, self.start + self.numel))

    def views(
        self, flat: Tensor, sharding: ParamSharding, *, owned_only: bool
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Parts of the run with their places in the global parameter.

        Args:
            flat: the run's elements, 1-D or of the whole shape.
            sharding: how the parameter is cut over tensor-parallel ranks.
            owned_only: leave out what another tensor-parallel rank counts and saves.

        Yields:
            Offsets in the global parameter, and a view of `flat`.
        """
        if owned_only and sharding.tied_key is not None:
            return
        for offsets, box in self._box_views(flat):
            for piece in sharding.pieces:
                if owned_only and not piece.is_owner:
                    continue
                if not offsets:
                    yield (), box
                    continue
                dim = sharding.dim
                start = max(offsets[dim], piece.local_start)
                end = min(offsets[dim] + box.shape[dim], piece.local_start + piece.length)
                if start < end:
                    place = list(offsets)
                    place[dim] = piece.global_start + start - piece.local_start
                    yield tuple(place), box.narrow(dim, start - offsets[dim], end - start)

    def padding(self, flat: Tensor, sharding: ParamSharding) -> Iterator[Tensor]:
        """Views of the parts that belong to no global element: vocabulary padding."""
        dim = sharding.dim
        spans = sorted((p.local_start, p.local_start + p.length) for p in sharding.pieces)
        for offsets, box in self._box_views(flat):
            if not offsets:
                continue
            position, last = offsets[dim], offsets[dim] + box.shape[dim]
            for start, end in [*spans, (last, last)]:
                gap = min(start, last) - position
                if gap > 0:
                    yield box.narrow(dim, position - offsets[dim], gap)
                position = max(position, end)

    def _box_views(self, flat: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        elements, position = flat.reshape(-1), 0
        for offsets, sizes in self.boxes():
            size = math.prod(sizes)
            yield offsets, elements[position : position + size].view(sizes)
            position += size


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rest = shape[1:]
    inner = math.prod(rest)
    (row, begin), (last_row, end) = divmod(start, inner), divmod(stop, inner)
    if row == last_row:
        yield from _in_row(row, _boxes(rest, begin, end))
        return
    if begin:
        yield from _in_row(row, _boxes(rest, begin, inner))
        row += 1
    if row < last_row:
        yield (row, *([0] * len(rest))), (last_row - row, *rest)
    yield from _in_row(last_row, _boxes(rest, 0, end))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for offsets, sizes in boxes:
        yield (row, *offsets), (1, *sizes)
