"""A function of whole weight matrices whose elements are dealt to several ranks.

Tensor-parallel ranks hold rows or columns, data-parallel ranks (ZeRO) runs of those. As many
matrices as there are ranks are worked on at a time: a reduce-scatter gives each rank one of them
whole, and an all-gather brings all results to all ranks. So each matrix is computed once, by one
rank, from the same numbers at every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from mcore.topology.collectives import start_all_gather_into_, start_reduce_scatter_into_
from mcore.topology.flat_range import FlatRange
from mcore.topology.group import Group
from mcore.topology.param_sharding import ParamSharding

Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class DealtMatrix:
    """A weight matrix, and the run of it that this rank has.

    Attributes:
        name: global name.
        sharding: how it is cut over tensor-parallel ranks.
        run: this rank's elements, or None where it has none.
    """

    name: str
    sharding: ParamSharding
    run: FlatRange | None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole matrix."""
        rows, columns = self.sharding.global_shape
        return rows, columns

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return math.prod(self.shape)

    def put_(self, whole: Tensor, own: Tensor) -> None:
        """Write this rank's elements to their places; of copies only the owner writes."""
        for place, view in self._views(own, owned_only=True):
            _at(whole, place, view).copy_(view)

    def take_(self, whole: Tensor, own: Tensor) -> None:
        """Read this rank's elements, copies of other ranks' included, from their places."""
        for place, view in self._views(own, owned_only=False):
            view.copy_(_at(whole, place, view))

    def _views(self, own: Tensor, *, owned_only: bool) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        if self.run is not None:
            yield from self.run.views(own, self.sharding, owned_only=owned_only)


def _at(whole: Tensor, place: tuple[int, ...], view: Tensor) -> Tensor:
    row, column = place
    return whole[row : row + view.shape[0], column : column + view.shape[1]]


def batches_of(
    matrices: Sequence[tuple[DealtMatrix, Other]], groups: Sequence[Group]
) -> Iterator[list[tuple[DealtMatrix, Other]]]:
    """As many matrices at a time as the groups have ranks together, each with what goes with it.

    Matrices of one size come together, so that little is padded.

    Args:
        matrices: in any order; batches are alike on all ranks that have the same ones.
        groups: axes that elements are dealt over.
    """
    ranks = math.prod(group.size for group in groups)
    ordered = sorted(matrices, key=lambda pair: (-pair[0].numel, pair[0].name))
    for start in range(0, len(ordered), ranks):
        yield ordered[start : start + ranks]


def map_whole_(
    batch: Sequence[tuple[DealtMatrix, Tensor | None]],
    function: Callable[[DealtMatrix, Tensor], Tensor],
    groups: Sequence[Group],
    like: Tensor,
) -> None:
    """Replace every matrix of a batch by a function of it, each rank keeping its own elements.

    Args:
        batch: one of `batches_of`: this rank's elements of each matrix (contiguous, overwritten;
            None where it has none), in the same order on all ranks.
        function: from the matrix's description and its whole value, [rows, columns], to a value of
            that shape.
        groups: axes that elements are dealt over, outermost first.
        like: gives dtype and device where this rank has no elements at all.

    Comm: one reduce-scatter and one all-gather of the largest matrix's bytes times the number of
        ranks, over each group.
    """
    ranks = math.prod(group.size for group in groups)
    assert len(batch) <= ranks
    room = max(matrix.numel for matrix, _ in batch)
    buffer = like.new_zeros(ranks * room)
    places = buffer.view(ranks, room)
    for (matrix, own), place in zip(batch, places, strict=False):
        if own is not None:
            matrix.put_(place[: matrix.numel].view(matrix.shape), own)
    mine, index = _reduce_scatter(buffer, groups)
    if index < len(batch):
        matrix = batch[index][0]
        whole = mine[: matrix.numel].view(matrix.shape)
        whole.copy_(function(matrix, whole))
    _all_gather(buffer, groups)
    for (matrix, own), place in zip(batch, places, strict=False):
        if own is not None:
            matrix.take_(place[: matrix.numel].view(matrix.shape), own)


def _reduce_scatter(buffer: Tensor, groups: Sequence[Group]) -> tuple[Tensor, int]:
    """This rank's part of the sum over all groups, and the part's number."""
    index = 0
    for group in groups:
        buffer = start_reduce_scatter_into_(buffer, group).wait()
        index = index * group.size + group.rank
    return buffer, index


def _all_gather(buffer: Tensor, groups: Sequence[Group]) -> None:
    """The reverse way: the innermost parts are gathered first."""
    parts = [buffer]
    for group in groups:
        parts.append(parts[-1].view(group.size, -1)[group.rank])
    for part, group in zip(reversed(parts[:-1]), reversed(groups), strict=True):
        start_all_gather_into_(part, group).wait()
