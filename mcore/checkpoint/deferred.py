"""A tensor that is made when its turn to be written comes: models larger than memory get saved."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from mcore.checkpoint.sharded_tensor import Rectangle, ShardedTensor
from mcore.errors import ShapeError


class DeferredTensor(ShardedTensor):
    """A whole tensor that this process can make; for saving only.

    It is made once when its first box is written and let go with its last one, so a save holds one
    such tensor at a time.

    Args:
        key: layout-free name.
        like: its shape and type, on any device; a `meta` tensor takes no memory.
        make: gives its elements.
    """

    __slots__ = ("_left", "_make", "_whole")

    def __init__(self, key: str, like: Tensor, make: Callable[[], Tensor]) -> None:
        outline = torch.empty(like.shape, dtype=like.dtype, device="meta")
        super().__init__(key, like.shape, like.dtype, [Rectangle((0,) * like.dim(), outline)])
        self._make = make
        self._whole: Tensor | None = None
        self._left = 0

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        outline = super().__get_tensor_shard__(index)
        if self._whole is None:
            self._whole = self._make()
            self._left = len(self.rectangles)
            if (self._whole.shape, self._whole.dtype) != (self.global_shape, self.dtype):
                raise ShapeError(
                    f"{self.key} was said to be {list(self.global_shape)} of {self.dtype}, it is "
                    f"{list(self._whole.shape)} of {self._whole.dtype}"
                )
        part = self._whole
        for dim, (start, size) in enumerate(zip(index.offset or (), outline.shape, strict=True)):
            part = part.narrow(dim, start, size)
        self._left -= 1
        if not self._left:
            self._whole = None
        return part
