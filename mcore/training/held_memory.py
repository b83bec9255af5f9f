"""Bytes that a rank holds between steps, counted from its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore.device import is_on_host
from mcore.distributed import DataParallelModule
from mcore.optimizer import MegatronOptimizer


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Measured bytes of a rank, by the names of `RankMemory`.

    Attributes:
        parameters: what the model computes with.
        gradients: accumulated gradients.
        main_parameters: fp32 copies that the optimizer updates.
        moments: the update rule's running tensors.
        in_host_memory: what of these is not on the device, where that is a GPU.
    """

    parameters: int
    gradients: int
    main_parameters: int
    moments: int
    in_host_memory: int

    @property
    def between_steps(self) -> int:
        """All that is on the device."""
        return self.parameters + self.gradients + self.main_parameters + self.moments


def held_memory(
    chunks: Sequence[DataParallelModule], optimizer: MegatronOptimizer, device: torch.device
) -> HeldMemory:
    """Count what is held after a step, padding of flat buffers included.

    Args:
        chunks: this rank's part of the model.
        optimizer: updates it.
        device: where it is trained.
    """
    sizes = dict.fromkeys(HeldMemory.__dataclass_fields__, 0)
    for kind, tensor in _held(chunks, optimizer):
        is_away = is_on_host(tensor) and device.type != "cpu"
        sizes["in_host_memory" if is_away else kind] += tensor.numel() * tensor.element_size()
    return HeldMemory(**sizes)


def _held(
    chunks: Sequence[DataParallelModule], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, Tensor]]:
    for chunk in chunks:
        yield from (("parameters", part.data) for part in chunk.held_parts())
        yield from (("gradients", grad) for grad in chunk.held_gradients())
    yield from optimizer.held_tensors()
