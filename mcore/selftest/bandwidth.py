"""How fast collectives move bytes on a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore.device import synchronize
from mcore.topology.collectives import (
    all_gather_along_dim,
    all_reduce_,
    barrier,
    receive_,
    reduce_scatter_along_dim,
    send,
)
from mcore.topology.group import Group

_WARM_UP, _REPEATS = 2, 5


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured on one group.

    Attributes:
        ranks: its members.
        gigabytes_per_second: by collective, 1e9 bytes. For collectives the bus bandwidth, that is
            what each rank's link carries whatever the group's size: bytes of the whole message x
            (n-1)/n / seconds, twice that for all-reduce. For send/receive from the first member to
            the last: bytes / seconds.
    """

    ranks: tuple[int, ...]
    gigabytes_per_second: dict[str, float]


def measure(group: Group, device: torch.device, message_bytes: int) -> Speed:
    """Time each collective; all members, and all groups of the kind, at the same time.

    Args:
        group: two members or more.
        device: where the tensors live.
        message_bytes: size of the whole tensor (of what is gathered, reduced or scattered).
    """
    n = group.size
    rows = max(1, message_bytes // 4 // n)
    whole = torch.zeros(rows * n, device=device)
    part = torch.zeros(rows, device=device)
    share = (n - 1) / n
    runs: dict[str, tuple[float, Callable[[], Tensor]]] = {
        "all-reduce": (2 * share, lambda: all_reduce_(whole, group)),
        "all-gather": (share, lambda: all_gather_along_dim(part, 0, group)),
        "reduce-scatter": (share, lambda: reduce_scatter_along_dim(whole, 0, group)),
        "send/receive": (1.0, lambda: _first_to_last(whole, group)),
    }
    speeds = {}
    for name, (factor, run) in runs.items():
        seconds = _seconds(run, group, device)
        speeds[name] = factor * whole.numel() * whole.element_size() / seconds / 1e9
    return Speed(group.ranks, speeds)


def _seconds(run: Callable[[], Tensor], group: Group, device: torch.device) -> float:
    """Seconds of one call on the slowest member."""
    for _ in range(_WARM_UP):
        run()
    synchronize(device)
    barrier(group)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        run()
    synchronize(device)
    elapsed = torch.tensor([(time.perf_counter() - started) / _REPEATS], device=device)
    return float(all_reduce_(elapsed, group, "max"))


def _first_to_last(x: Tensor, group: Group) -> Tensor:
    if group.is_first:
        send(x, group, group.size - 1)
    elif group.is_last:
        receive_(x, group, 0)
    return x
