"""Every collective on a group, against what its definition says.

Each rank computes what every member puts in, so it knows the right result without communication.
The numbers are whole and so small that sums are exact in every type: any difference is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mcore.topology.collectives import (
    all_gather_along_dim,
    all_gather_object,
    all_reduce,
    all_reduce_,
    barrier,
    broadcast_,
    receive_,
    reduce_scatter_along_dim,
    send,
    start_all_gather_into_,
    start_reduce_scatter_into_,
)
from mcore.topology.group import Group

#: Types that training communicates.
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)

#: Elements of the large message: more than one chunk of any backend's ring.
_LARGE = 2**18 + 6

_Case = tuple[str, Callable[[], Tensor], Tensor]


def check_group(group: Group, device: torch.device) -> tuple[int, list[str]]:
    """Run every collective on a group; all members call this at the same time.

    Args:
        group: two members or more.
        device: where the tensors live.

    Returns:
        Number of checks, and a line for each that this rank saw fail.
    """
    count, faults = 0, []
    for dtype in DTYPES:
        for name, run, expected in _cases(group, dtype, device):
            count += 1
            problem = _difference(run(), expected)
            if problem:
                faults.append(
                    f"{name} of {str(dtype).removeprefix('torch.')} on group {group.name} "
                    f"(ranks {_listed(group.ranks)}), seen by rank {group.global_rank}: {problem}"
                )
    count += 1
    names = all_gather_object(f"rank {group.rank}", group)
    if names != [f"rank {member}" for member in range(group.size)]:
        faults.append(f"all_gather_object on group {group.name}: got {names}")
    barrier(group)
    return count, faults


def _cases(group: Group, dtype: torch.dtype, device: torch.device) -> Iterator[_Case]:
    """(name, what to run, what it has to give)."""
    n, me = group.size, group.rank

    def inputs(*shape: int) -> list[Tensor]:
        """What every member puts in."""
        return [_numbers(shape, member, n, dtype, device) for member in range(n)]

    for shape in ((1,), (2 * n, 3, 5), (_LARGE,)):
        given = inputs(*shape)
        stacked = torch.stack(given)
        reduced = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0)}
        for op, expected in reduced.items():
            yield f"all_reduce ({op})", partial(all_reduce, given[me], group, op), expected
        before = given[me].clone()
        yield "input of all_reduce", partial(given.__getitem__, me), before
    given = inputs(4 * n, 2 * n)
    total = torch.stack(given).sum(0)
    yield "all_reduce_ (sum)", partial(all_reduce_, given[me].clone(), group), total
    for dim in (0, 1):
        yield (
            f"all_gather (dim {dim})",
            partial(all_gather_along_dim, given[me], dim, group),
            torch.cat(given, dim),
        )
        yield (
            f"reduce_scatter (dim {dim})",
            partial(reduce_scatter_along_dim, given[me], dim, group),
            total.chunk(n, dim)[me].contiguous(),
        )
    yield from _buffer_cases(group, inputs(_LARGE // n * n))
    for source in range(n):
        yield (
            f"broadcast from {source}",
            partial(broadcast_, given[me].clone(), group, source),
            given[source],
        )
    yield "send and receive", partial(_pass_on, given[me], group), given[(me - 1) % n]


def _buffer_cases(group: Group, buffers: list[Tensor]) -> Iterator[_Case]:
    n, me = group.size, group.rank
    own = [buffer.view(n, -1)[member] for member, buffer in enumerate(buffers)]

    def gather() -> Tensor:
        buffer = torch.zeros_like(buffers[me])
        buffer.view(n, -1)[me].copy_(own[me])
        return start_all_gather_into_(buffer, group).wait()

    def scatter() -> Tensor:
        return start_reduce_scatter_into_(buffers[me].clone(), group).wait()

    yield "all_gather into a buffer", gather, torch.cat(own)
    total = torch.stack(buffers).sum(0)
    yield "reduce_scatter into a buffer", scatter, total.view(n, -1)[me]


def _pass_on(x: Tensor, group: Group) -> Tensor:
    """What the member before sends, while this one sends `x` to the next."""
    received = torch.empty_like(x)
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.rank % 2 == 0:  # neighbours take turns, so that nobody waits for itself
        send(x, group, following)
        return receive_(received, group, before)
    receive_(received, group, before)
    send(x, group, following)
    return received


def _numbers(
    shape: tuple[int, ...], member: int, size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Whole numbers below 8, so sparse that no sum over the group passes 256 (exact in bf16)."""
    positions = torch.arange(math.prod(shape), device=device)
    spread = max(1, math.ceil(7 * size / 256))
    values = (positions * 7 + member * 3 + 1) % 8
    values = values * ((positions + member) % spread == 0)
    return values.to(dtype).view(shape)


def _difference(result: Tensor, expected: Tensor) -> str | None:
    if result.shape != expected.shape:
        return f"shape {list(result.shape)}, wanted {list(expected.shape)}"
    if torch.equal(result, expected):
        return None
    wrong = (result != expected).flatten()
    first = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {result.numel()} elements are wrong; the first, element {first}, "
        f"is {result.flatten()[first].item()} and should be {expected.flatten()[first].item()}"
    )


def _listed(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... {ranks[-1]}"
