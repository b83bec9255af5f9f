"""Main parameters and moments of some parameters in host memory, and their update there.

Gradients travel to pinned memory while the device updates its own parameters; updated parameters
travel back while the host goes on. On the CPU everything is in host memory anyway and nothing is
moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mcore.device import HostTransfer, host_copy
from mcore.optimizer.gradients import Gradients
from mcore.optimizer.param_groups import OptimizedParam, ParamGroup


class Rule(Protocol):
    """What an update rule offers."""

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of main parameters."""

    def tensors_of(self, param: Tensor) -> dict[str, Tensor]:
        """State of a parameter by the name that checkpoints use."""

    def set_step_count(self, value: int) -> None:
        """Go on after so many updates."""

    def step_unless(self, skip: Tensor, grads: Gradients) -> None:
        """Update parameters and state, or leave them as they are."""


class OffloadedRule:
    """One update rule on the device and one on the host, as a single one.

    Args:
        groups: parameter groups over all main parameters.
        params: what is updated, those of the host marked.
        build: makes a rule of groups.
        device: where the model is.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        params: Sequence[OptimizedParam],
        build: Callable[[list[ParamGroup]], Rule],
        device: torch.device,
    ) -> None:
        self._host_params = [item for item in params if item.is_offloaded]
        mains = {id(item.main) for item in self._host_params}
        self._on_device = build(_only(groups, lambda main: id(main) not in mains))
        self._on_host = build(_only(groups, lambda main: id(main) in mains))
        self._host_mains = mains
        self._grads = {
            item.main: host_copy(torch.zeros_like(item.main)) for item in self._host_params
        }
        self._transfer = HostTransfer(device)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of the device, then those of the host."""
        return [*self._on_device.param_groups, *self._on_host.param_groups]

    def set_step_count(self, value: int) -> None:
        """Go on after so many updates."""
        self._on_device.set_step_count(value)
        self._on_host.set_step_count(value)

    def tensors_of(self, param: Tensor) -> dict[str, Tensor]:
        """State of a parameter by the name that checkpoints use."""
        rule = self._on_host if id(param) in self._host_mains else self._on_device
        return rule.tensors_of(param)

    def places(self) -> Iterator[Tensor]:
        """Where gradients arrive on the host."""
        yield from self._grads.values()

    def step_unless(self, skip: Tensor, grads: Gradients) -> None:
        """Update what is on the device while gradients travel, then what is on the host.

        The host waits for its gradients and for `skip`.

        Args:
            skip: one fp32 element on the device: 1 = leave all as it is.
            grads: on the device; parameters without one stay.
        """
        moving = {main: place for main, place in self._grads.items() if main in grads}
        self._transfer.start_to_host((grads.of(main), place) for main, place in moving.items())
        self._on_device.step_unless(skip, grads)
        arrived = Gradients()
        for main, place in moving.items():
            arrived.add(main, place)
        self._transfer.wait_for_host()
        self._on_host.step_unless(skip.cpu(), arrived)
        self._transfer.to_device((item.main, item.part.data) for item in self._host_params)


def _only(groups: list[ParamGroup], keep: Callable[[Tensor], bool]) -> list[ParamGroup]:
    return [{**group, "params": [p for p in group["params"] if keep(p)]} for group in groups]
