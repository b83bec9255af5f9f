"""A tensor of which this process holds rectangles: what checkpoints save, load and reshard."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mcore.errors import ShapeError
from mcore.topology.flat_range import FlatRange
from mcore.topology.param_sharding import ParamSharding

# Unit of checksums, of work shared between replicas and of memory while loading.
CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box of a global tensor that this process holds.

    Attributes:
        offsets: position of its first element in the global tensor.
        data: its elements, a view of live memory on any device; its shape is the size of the box.
    """

    offsets: tuple[int, ...]
    data: Tensor

    @property
    def sizes(self) -> torch.Size:
        """Extent along each dimension."""
        return self.data.shape


class ShardedTensor:
    """A global tensor and the rectangles of it that this process holds.

    It implements the protocol of `torch.distributed.checkpoint`, so that its planners remove
    duplicates between replicas when saving and find the overlaps of any two layouts when loading.

    Attributes:
        key: layout-free name, `model.decoder.layers.3.mlp.linear_fc2.weight`.
        global_shape: shape of the whole tensor, without padding.
        dtype: element type of all rectangles.
        rectangles: what this process holds; boxes over `CHUNK_BYTES` are cut into runs of rows.
        padding: views that belong to no global element; loading fills them with zeros.
    """

    __slots__ = ("dtype", "global_shape", "key", "padding", "rectangles")

    def __init__(
        self,
        key: str,
        global_shape: Iterable[int],
        dtype: torch.dtype,
        rectangles: Iterable[Rectangle],
        padding: Iterable[Tensor] = (),
    ) -> None:
        self.key = key
        self.global_shape = torch.Size(global_shape)
        self.dtype = dtype
        self.padding = tuple(padding)
        boxes: list[Rectangle] = []
        for rectangle in rectangles:
            self._check(rectangle)
            boxes += _row_runs(rectangle)
        self.rectangles = tuple(boxes)

    def _check(self, rectangle: Rectangle) -> None:
        offsets, sizes = rectangle.offsets, rectangle.sizes
        fits = len(offsets) == len(sizes) == len(self.global_shape) and all(
            start >= 0 and start + size <= extent
            for start, size, extent in zip(offsets, sizes, self.global_shape, strict=True)
        )
        if not fits:
            raise ShapeError(
                f"{self.key}: a rectangle {list(sizes)} at {list(offsets)} does not lie inside the "
                f"global shape {list(self.global_shape)}"
            )
        if rectangle.data.dtype != self.dtype:
            raise ShapeError(
                f"{self.key}: a rectangle is {rectangle.data.dtype}, the tensor {self.dtype}"
            )

    def size(self) -> torch.Size:
        """Global shape (the planners ask for it under this name)."""
        return self.global_shape

    def joined(self, other: ShardedTensor) -> ShardedTensor:
        """The same global tensor with the rectangles of both.

        For a parameter that one process holds twice: a tied output layer beside its embedding.

        Raises:
            ShapeError: the two are not the same global tensor.
        """
        if (self.key, self.global_shape, self.dtype) != (
            other.key,
            other.global_shape,
            other.dtype,
        ):
            raise ShapeError(f"{self.key} and {other.key} are not parts of one tensor")
        return ShardedTensor(
            self.key,
            self.global_shape,
            self.dtype,
            self.rectangles + other.rectangles,
            self.padding + other.padding,
        )

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        is_empty = math.prod(self.global_shape) == 0
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), box.sizes),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.global_shape,
                ),
            )
            for box in self.rectangles
            if is_empty or box.data.numel()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), box.sizes) for box in self.rectangles]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        boxes, hint = self.rectangles, index.index
        wanted = tuple(index.offset or ())
        if hint is not None and hint < len(boxes) and boxes[hint].offsets == wanted:
            return boxes[hint].data
        for box in boxes:
            if box.offsets == wanted and box.data.numel():
                return box.data
        return next(box.data for box in boxes if box.offsets == wanted)


def whole_tensor(key: str, tensor: Tensor) -> ShardedTensor:
    """A tensor that this process holds whole; of several processes that hold it, one writes it."""
    box = Rectangle((0,) * tensor.dim(), tensor.detach())
    return ShardedTensor(key, tensor.shape, tensor.dtype, [box])


def sharded_parameter(
    key: str,
    tensor: Tensor,
    sharding: ParamSharding,
    *,
    for_save: bool,
    run: FlatRange | None = None,
) -> ShardedTensor:
    """A parameter, or an optimizer state of the same local shape, as part of its global tensor.

    Args:
        key: layout-free name; `model.` + the name of `global_named_parameters` for a parameter.
        tensor: this rank's part, of the parameter's local shape (or the elements of `run`); not
            copied.
        sharding: how the parameter is cut (`sharding_of`).
        for_save: True = only what this rank owns: no replicated rows, nothing of a tied copy.
            False = everything, to be filled by `load`; padding rows become zero there.
        run: the elements of the parameter's local tensor that `tensor` holds, where data-parallel
            ranks share it out; all of them when None.
    """
    local = tensor.detach()
    run = FlatRange.whole(local) if run is None else run
    boxes = [
        Rectangle(offsets, view)
        for offsets, view in run.views(local, sharding, owned_only=for_save)
    ]
    padding = [] if for_save else list(run.padding(local, sharding))
    return ShardedTensor(key, sharding.global_shape, tensor.dtype, boxes, padding)


def _row_runs(box: Rectangle) -> Iterator[Rectangle]:
    nbytes = box.data.numel() * box.data.element_size()
    if nbytes <= CHUNK_BYTES:
        yield box
        return
    rows = box.sizes[0]
    step = max(1, CHUNK_BYTES // (nbytes // rows))
    for start in range(0, rows, step):
        offsets = (box.offsets[0] + start, *box.offsets[1:])
        yield Rectangle(offsets, box.data.narrow(0, start, min(step, rows - start)))
