"""A first step in which data-parallel ranks compare which parts of the model they use (ZeRO-3).

A part's parameters are gathered by all ranks together. A part that only some of them use is
gathered by those alone: the job would stand still, or other numbers would come together. In the
first step the ranks therefore tell each other what they are about to gather, before they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mcore.errors import ScheduleError
from mcore.topology.collectives import all_gather_object, all_reduce_
from mcore.topology.group import Group


def grad_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output that a backward can begin at."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        yield from grad_tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from grad_tensors(item)


class UnitAgreement:
    """Compares every use of every unit over data-parallel ranks, until `end`.

    Args:
        units: names and modules, in the same order on all ranks.
        group: data-parallel ranks.
        device: where numbers are compared.

    Comm: two numbers for each use, op max, waited for; names where they differ.
    """

    def __init__(
        self, units: Sequence[tuple[str, nn.Module]], group: Group, device: torch.device
    ) -> None:
        self._group = group
        self._device = device
        self._events = ["the end of the step"]
        self._handles: list[Any] = []
        for name, unit in units if group.size > 1 else ():
            shown = name or "the model itself"
            self._events += [f"the forward of {shown}", f"the backward of {shown}"]
            forward, backward = len(self._events) - 2, len(self._events) - 1
            # Before the hooks that gather, which are there already.
            self._handles += [
                unit.register_forward_pre_hook(
                    partial(self._before_forward, forward), prepend=True
                ),
                unit.register_forward_hook(partial(self._watch_backward, backward), prepend=True),
            ]

    def end(self) -> None:
        """The first step is done; later ones are not compared.

        Raises:
            ScheduleError: another rank is not there yet.
        """
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._compare(0)

    def _before_forward(self, event: int, *_: Any) -> None:
        self._compare(event)

    def _watch_backward(self, event: int, _: nn.Module, __: Any, output: Any) -> None:
        is_done: list[bool] = []

        def compare(_: Tensor) -> None:
            if not is_done and self._handles:
                is_done.append(True)
                self._compare(event)

        for tensor in grad_tensors(output) if torch.is_grad_enabled() else ():
            tensor.register_hook(compare)

    def _compare(self, event: int) -> None:
        seen = torch.tensor([event, -event], device=self._device)
        largest, smallest = all_reduce_(seen, self._group, "max").tolist()
        if largest == event == -smallest:
            return
        everywhere = all_gather_object(self._events[event], self._group)
        found = zip(self._group.ranks, everywhere, strict=True)
        raise ScheduleError(
            "data-parallel ranks use different parts of the model: "
            + ", ".join(f"rank {rank} is at {what}" for rank, what in found)
            + ". With optim_grads_params all of them gather a part together: call it on every rank "
            "(its result may be multiplied by zero), or use another sharding strategy"
        )
