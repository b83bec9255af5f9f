"""Copies of what is to be saved, in host memory that every save uses again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mcore import device
from mcore.checkpoint.saver import as_sharded
from mcore.checkpoint.sharded_tensor import Rectangle, ShardedTensor


class Staging:
    """Buffers for the tensors of one rank; page-locked where they come from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, tensors: Mapping[str, ShardedTensor | Tensor]) -> dict[str, ShardedTensor]:
        """Copies that share no memory with the originals, valid until the next call.

        Buffers are taken anew only for boxes that have another shape or type than last time.
        """
        buffers: dict[tuple[str, int], Tensor] = {}
        staged: dict[str, ShardedTensor] = {}
        sources: set[torch.device] = set()
        for key, value in tensors.items():
            sharded = as_sharded(key, value)
            boxes = []
            for i, box in enumerate(sharded.rectangles):
                buffer = self._buffer((key, i), box.data)
                buffer.copy_(box.data, non_blocking=True)
                buffers[key, i] = buffer
                boxes.append(Rectangle(box.offsets, buffer))
                sources.add(box.data.device)
            staged[key] = ShardedTensor(key, sharded.global_shape, sharded.dtype, boxes)
        for source in sources:
            device.synchronize(source)
        self._buffers = buffers
        return staged

    def _buffer(self, place: tuple[str, int], like: Tensor) -> Tensor:
        buffer = self._buffers.get(place)
        if buffer is not None and buffer.shape == like.shape and buffer.dtype == like.dtype:
            return buffer
        return torch.empty(
            like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type == "cuda"
        )
