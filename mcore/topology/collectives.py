"""Collectives over a `Group`, without autograd.

No function changes its input unless its name ends in `_`. Groups of one rank never communicate.
What a backend lacks or does slowly is settled here and nowhere else: gloo's own reduce-scatter is
an all-reduce and more, so on gloo an all-to-all and a sum take its place, and small all-gathers are
all-to-alls as well; large ones are point-to-point messages, which need no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mcore.errors import LostPeerError, ShapeError
from mcore.topology.group import Group

#: Bytes of the result up to which an all-gather over gloo is an all-to-all of copies.
_SMALL = 1 << 20
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Work(Protocol):
    def wait(self) -> Any: ...


#: How gloo says that a peer has ended or was silent for too long.
_LOSSES = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "Timed out")


def is_loss_of_peer(error: RuntimeError) -> bool:
    """Whether communication failed since another rank ended or stands still."""
    return any(text in str(error) for text in _LOSSES)


@contextmanager
def _naming_lost_peers(group: Group | None) -> Iterator[None]:
    """Say among which ranks the one is that died or stands still."""
    try:
        yield
    except RuntimeError as error:
        if group is None or not is_loss_of_peer(error):
            raise
        others = [rank for rank in group.ranks if rank != group.global_rank]
        which = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
        reason = str(error).split("\n", 1)[0].split(". ", 1)[0]
        raise LostPeerError(
            f"rank {group.global_rank} has lost {which} in a collective of group {group.name}: "
            f"that process died or stands still ({reason})"
        ) from error


class Pending:
    """A collective under way; `wait` gives its result.

    Args:
        works: what has to end first.
        finish: makes the result.
        group: the ranks that take part; None where nothing is communicated.
    """

    __slots__ = ("_finish", "_group", "_works")

    def __init__(
        self, works: list[_Work], finish: Callable[[], Tensor], group: Group | None = None
    ) -> None:
        self._works = works
        self._finish = finish
        self._group = group

    def wait(self) -> Tensor:
        """Result of the collective; on CUDA the current stream waits, not the host.

        Raises:
            LostPeerError: a rank of the group is gone, or silent for longer than its timeout.
        """
        if self._works:
            with _naming_lost_peers(self._group):
                for work in self._works:
                    work.wait()
            self._works = []
        return self._finish()


def start_all_reduce_(x: Tensor, group: Group, op: str = "sum") -> Pending:
    """Start reducing `x` in place over the group.

    Args:
        x: any shape, contiguous; not to be touched before `wait`.
        group: the ranks.
        op: `sum`, `max` or `min`.

    Comm: one all-reduce of x's bytes; none when the group has one rank.
    """
    if group.size == 1:
        return Pending([], lambda: x)
    work = dist.all_reduce(x, op=_OPS[op], group=group.handle, async_op=True)
    assert work is not None
    return Pending([work], lambda: x, group)


def all_reduce_(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce `x` in place over the group and return it."""
    return start_all_reduce_(x, group, op).wait()


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduction of `x` over the group in a new tensor (`x` itself when the group has one rank)."""
    return x if group.size == 1 else all_reduce_(x.contiguous().clone(), group, op)


def start_all_gather_along_dim(x: Tensor, dim: int, group: Group) -> Pending:
    """Start gathering every rank's `x`; the result is their concatenation along `dim`.

    Comm: one all-gather of x's bytes from each rank; none when the group has one rank.
    """
    if group.size == 1:
        return Pending([], lambda: x)
    x = x.contiguous()
    gathered = x.new_empty((group.size, *x.shape))
    works = _start_all_gather(gathered, x, group)
    return Pending(works, lambda: _join(gathered, dim), group)


def all_gather_along_dim(x: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenation of every rank's `x` along `dim`, equal on all ranks."""
    return start_all_gather_along_dim(x, dim, group).wait()


def start_reduce_scatter_along_dim(x: Tensor, dim: int, group: Group) -> Pending:
    """Start summing `x` over the group; each rank's result is its slice along `dim`.

    Comm: one reduce-scatter of x's bytes; none when the group has one rank.

    Raises:
        ShapeError: the dimension does not divide by the group's size.
    """
    if group.size == 1:
        return Pending([], lambda: x)
    if x.shape[dim] % group.size:
        raise ShapeError(
            f"dimension {dim} of {list(x.shape)} must be divisible by the size of group "
            f"{group.name} ({group.size}, ranks {list(group.ranks)})"
        )
    stacked = _stack(x, dim, group.size)
    if _is_gloo(group):
        received = torch.empty_like(stacked)
        work = _all_to_all(received, stacked, group)
        return Pending([work], lambda: _sum_in_rank_order(received), group)
    output = torch.empty_like(stacked[0])
    work = _reduce_scatter_single(output, stacked.flatten(0, 1), group)
    return Pending([work], lambda: output, group)


def reduce_scatter_along_dim(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's slice along `dim` of the sum of every rank's `x`."""
    return start_reduce_scatter_along_dim(x, dim, group).wait()


def start_all_gather_into_(buffer: Tensor, group: Group) -> Pending:
    """Start filling a buffer with every rank's part of it; this rank's part is there already.

    Args:
        buffer: 1-D, contiguous, divisible by the group's size; part i belongs to rank i of the
            group. Not to be touched before `wait`.
        group: the ranks.

    Comm: one all-gather of the buffer's bytes / group size from each rank; none with one rank.
    """
    if group.size == 1:
        return Pending([], lambda: buffer)
    parts = buffer.view(group.size, -1)
    return Pending(_start_all_gather(parts, parts[group.rank], group), lambda: buffer, group)


def start_reduce_scatter_into_(buffer: Tensor, group: Group) -> Pending:
    """Start summing a buffer over the group; this rank's part of it becomes the sum.

    The other parts keep this rank's own values or are overwritten.

    Args:
        buffer: 1-D, contiguous, divisible by the group's size; part i goes to rank i of the group.
            Not to be touched before `wait`.
        group: the ranks.

    Comm: one reduce-scatter of the buffer's bytes; none with one rank.
    """
    if group.size == 1:
        return Pending([], lambda: buffer)
    parts = buffer.view(group.size, -1)
    own = parts[group.rank]
    if _is_gloo(group):
        received = torch.empty_like(parts)
        work = _all_to_all(received, parts, group)
        return Pending([work], lambda: own.copy_(_sum_in_rank_order(received)), group)
    return Pending([_reduce_scatter_single(own, buffer, group)], lambda: own, group)


def broadcast_(x: Tensor, group: Group, src: int = 0) -> Tensor:
    """Overwrite `x` with the value of the member at position `src`, and return it."""
    if group.size > 1:
        with _naming_lost_peers(group):
            dist.broadcast(x, src=group.ranks[src], group=group.handle)
    return x


def send(x: Tensor, group: Group, target: int) -> None:
    """Send `x` to the member at position `target`, which calls `receive_`; waits until it may go.

    Comm: one message of x's bytes.
    """
    dist.send(x.contiguous(), dst=group.ranks[target], group=group.handle)


def receive_(x: Tensor, group: Group, source: int) -> Tensor:
    """Overwrite `x`, contiguous, with what the member at position `source` sends; returns it."""
    dist.recv(x, src=group.ranks[source], group=group.handle)
    return x


def barrier(group: Group) -> None:
    """Wait until every member is here."""
    if group.size > 1:
        with _naming_lost_peers(group):
            dist.barrier(group=group.handle)


def all_gather_object(obj: Any, group: Group) -> list[Any]:
    """Every member's object, in group order. For small host-side facts only, never in the step."""
    if group.size == 1:
        return [obj]
    gathered: list[Any] = [None] * group.size
    with _naming_lost_peers(group):
        dist.all_gather_object(gathered, obj, group=group.handle)
    return gathered


def _is_gloo(group: Group) -> bool:
    return str(dist.get_backend(group.handle)) == "gloo"


def _start_all_gather(parts: Tensor, own: Tensor, group: Group) -> list[_Work]:
    """Fill `parts` ([group's size, ...]) with every member's `own`, which may lie in it already."""
    if not _is_gloo(group):
        return [_all_gather_single(parts.flatten(0, 1), own, group)]
    if parts.numel() * parts.element_size() <= _SMALL:
        return [_all_to_all(parts, own.expand(parts.shape).contiguous(), group)]
    works: list[_Work | None] = []
    for step in range(1, group.size):
        source, target = (group.rank - step) % group.size, (group.rank + step) % group.size
        with _naming_lost_peers(group):
            works.append(dist.irecv(parts[source], src=group.ranks[source], group=group.handle))
            works.append(dist.isend(own, dst=group.ranks[target], group=group.handle))
    parts[group.rank].copy_(own)
    return [work for work in works if work is not None]


def _all_to_all(received: Tensor, stacked: Tensor, group: Group) -> _Work:
    """Member i's `stacked[this rank]` comes into `received[i]`."""
    work: _Work = dist.all_to_all_single(received, stacked, group=group.handle, async_op=True)
    return work


def _stack(x: Tensor, dim: int, count: int) -> Tensor:
    """Slices of `x` along `dim` one after another, [count, ...]; no copy where they lie so."""
    if dim == 0:
        rows: Tensor = x.contiguous().unflatten(0, (count, -1))
        return rows
    return torch.stack(x.chunk(count, dim))


def _sum_in_rank_order(received: Tensor) -> Tensor:
    """Sum over the first dimension, always in rank order, so that every slice is summed alike."""
    total = received[0]
    for part in received[1:]:
        total = total + part
    return total


def _join(gathered: Tensor, dim: int) -> Tensor:
    """Concatenate along `dim` what lies stacked along a new first dimension."""
    if dim == 0:
        return gathered.flatten(0, 1)
    return torch.cat(gathered.unbind(0), dim=dim)


# torch 2.13 renames both of these; either spelling takes these arguments.


def _all_gather_single(output: Tensor, x: Tensor, group: Group) -> _Work:
    gather = dist.__dict__.get("all_gather_single") or dist.all_gather_into_tensor
    work: _Work = gather(output, x, group=group.handle, async_op=True)
    return work


def _reduce_scatter_single(output: Tensor, x: Tensor, group: Group) -> _Work:
    scatter = dist.__dict__.get("reduce_scatter_single") or dist.reduce_scatter_tensor
    work: _Work = scatter(output, x, group=group.handle, async_op=True)
    return work
