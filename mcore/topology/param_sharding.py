"""How a parameter is cut over tensor-parallel ranks, declared once by the layer that owns it.

Initialisation, the gradient norm, gradient reduction, checkpoints and conversion all read this
declaration, so none of them knows about layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from mcore.errors import ShapeError
from mcore.topology.group import Group

_ATTRIBUTE = "sharding"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of rows of the local tensor along the cut dimension, and its place in the global one.

    Attributes:
        local_start: first row in this rank's tensor.
        global_start: first row in the global tensor.
        length: number of rows.
        is_owner: this rank counts and saves the rows; False where another holder does.
        is_shared: several ranks hold these rows and each computes a part of their gradient (key and
            value heads when there are fewer query groups than ranks): the parts have to be summed.
    """

    local_start: int
    global_start: int
    length: int
    is_owner: bool = True
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class ParamSharding:
    """Where each part of a local parameter lies in the global parameter.

    Attributes:
        global_shape: shape of the whole parameter, without vocabulary padding.
        tp_dim: dimension that is cut over tensor-parallel ranks; None = every rank holds all of it.
        pieces: local rows and their global places along `dim`. Local rows that no piece covers are
            padding: never counted, saved or trained.
        sequence_parallel: the gradient on each rank covers its part of the sequence only, so it has
            to be summed over the tensor-parallel group.
        tied_key: global name of the parameter that this one is a copy of (a tied output layer on
            another pipeline stage); a copy is neither counted nor saved.
        row_parts: global rows repeat in runs of these lengths, and each kind of run is a matrix of
            its own (queries, key and value of a head group); empty = one matrix.
    """

    global_shape: tuple[int, ...]
    tp_dim: int | None
    pieces: tuple[Piece, ...]
    sequence_parallel: bool = False
    tied_key: str | None = None
    row_parts: tuple[int, ...] = ()

    @property
    def dim(self) -> int:
        """Dimension that the pieces run along."""
        return 0 if self.tp_dim is None else self.tp_dim

    def views(self, tensor: Tensor, *, owned_only: bool = False) -> Iterator[tuple[Piece, Tensor]]:
        """Each piece with its view of a tensor that has the parameter's local shape."""
        for piece in self.pieces:
            if piece.is_owner or not owned_only:
                whole = tensor.dim() == 0
                yield (
                    piece,
                    (tensor if whole else tensor.narrow(self.dim, piece.local_start, piece.length)),
                )

    def owned(self, tensor: Tensor) -> list[Tensor]:
        """Views of the parts that this rank counts and saves; none for a tied copy."""
        if self.tied_key is not None:
            return []
        return [view for _, view in self.views(tensor, owned_only=True)]

    def owned_numel(self, local_shape: tuple[int, ...]) -> int:
        """Elements that this rank counts of a local tensor of a shape."""
        if self.tied_key is not None:
            return 0
        rows = sum(piece.length for piece in self.pieces if piece.is_owner)
        others = [size for d, size in enumerate(local_shape) if d != self.dim]
        return rows * math.prod(others)

    def global_offsets(self, piece: Piece) -> tuple[int, ...]:
        """Position of a piece's first element in the global tensor."""
        if not self.global_shape:
            return ()
        return tuple(
            piece.global_start if d == self.dim else 0 for d in range(len(self.global_shape))
        )


@dataclass(frozen=True, slots=True)
class RowCut:
    """How the rows of a dimension are dealt to this rank, whatever the other dimensions are.

    Attributes:
        total: global rows, without padding.
        local: rows of this rank's tensor, padding included.
        pieces: which local rows are which global rows.
        parts: see `ParamSharding.row_parts`.
    """

    total: int
    local: int
    pieces: tuple[Piece, ...]
    parts: tuple[int, ...] = ()

    def sharding(self, *other: int, dim: int = 0) -> ParamSharding:
        """Declaration for a parameter with these rows along `dim` and `other` sizes elsewhere."""
        shape = list(other)
        shape.insert(dim, self.total)
        return ParamSharding(tuple(shape), dim, self.pieces, row_parts=self.parts)


def even_rows(total: int, group: Group, *, blocks: int = 1, used: int | None = None) -> RowCut:
    """Rows dealt in equal runs.

    Args:
        total: global rows, padding included.
        group: tensor-parallel group.
        blocks: the rows form this many equal blocks, each dealt on its own (2 for gate and up
            projections in one matrix).
        used: rows that exist; the rest, at the end, is padding (vocabulary).

    Raises:
        ShapeError: the rows do not divide by blocks x group size.
    """
    if total % (blocks * group.size):
        factor = f"{blocks} x {group.size}" if blocks > 1 else str(group.size)
        raise ShapeError(
            f"size {total} must be divisible by {factor} (tensor-parallel size {group.size}); "
            "change the size or the tensor-parallel size"
        )
    block, per_rank = total // blocks, total // blocks // group.size
    limit = total if used is None else used
    pieces = []
    for i in range(blocks):
        start = i * block + group.rank * per_rank
        length = min(per_rank, max(0, limit - start))
        if length:
            pieces.append(Piece(i * per_rank, start, length))
    return RowCut(limit, blocks * per_rank, tuple(pieces))


def replicated_sharding(
    shape: tuple[int, ...], group: Group, *, sequence_parallel: bool = False
) -> ParamSharding:
    """Sharding of a parameter that every rank of the group holds whole; the first owns it."""
    rows = shape[0] if shape else 1
    piece = Piece(0, 0, rows, is_owner=group.is_first)
    return ParamSharding(shape, None, (piece,), sequence_parallel)


def set_sharding(param: Tensor, sharding: ParamSharding) -> None:
    """Declare how a parameter is cut, with Megatron's attributes beside ours."""
    setattr(param, _ATTRIBUTE, sharding)
    set_tensor_model_parallel_attributes(
        param, sharding.tp_dim is not None, -1 if sharding.tp_dim is None else sharding.tp_dim, 1
    )
    param.sequence_parallel = sharding.sequence_parallel  # type: ignore[attr-defined]


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Declare an even cut of a parameter of a user's own layer, in Megatron's attributes.

    Args:
        tensor: the parameter, this rank's part.
        is_parallel: whether the ranks hold different parts.
        dim: dimension that is cut, -1 where none is.
        stride: the rows form this many blocks, each cut on its own.
    """
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]


def sharding_of(param: Tensor, group: Group) -> ParamSharding:
    """The declaration of a parameter; one without is replicated over the tensor-parallel group.

    A user's own module may set Megatron's attributes instead of declaring: `sequence_parallel`, or
    `tensor_model_parallel`, `partition_dim` and `partition_stride` for an even cut.
    """
    declared = param.__dict__.get(_ATTRIBUTE)
    if declared is not None:
        assert isinstance(declared, ParamSharding)
        return declared
    if param.__dict__.get("tensor_model_parallel", False):
        dim = param.__dict__["partition_dim"] % param.dim()
        others = list(param.shape)
        rows = others.pop(dim) * group.size
        cut = even_rows(rows, group, blocks=param.__dict__["partition_stride"])
        return cut.sharding(*others, dim=dim)
    sequence_parallel = bool(param.__dict__.get("sequence_parallel", False))
    return replicated_sharding(tuple(param.shape), group, sequence_parallel=sequence_parallel)


_LAYER = re.compile(r"^layers\.(\d+)(?=\.|$)")


def global_named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with names that do not depend on the layout.

    A module with an integer attribute `layer_offset` holds layers `layers.I` whose global number is
    I + layer_offset. `module.` prefixes of wrappers are dropped. A tied copy has its original's
    name.
    """
    for name, param in module.named_parameters():
        sharding = param.__dict__.get(_ATTRIBUTE)
        if sharding is not None and sharding.tied_key is not None:
            yield sharding.tied_key, param
        else:
            yield global_name(module, name), param


def global_name(module: nn.Module, name: str) -> str:
    """Layout-free name of a parameter or module that `module` knows as `name`."""
    parts: list[str] = []
    rest, owner = name, module
    while rest:
        head, _, tail = rest.partition(".")
        match = _LAYER.match(rest)
        offset = owner.__dict__.get("layer_offset")
        if match and isinstance(offset, int):
            layer = int(match.group(1))
            parts += ["layers", str(layer + offset)]
            owner = owner.get_submodule(f"layers.{layer}")
            rest = rest[match.end() + 1 :]
            continue
        if not (head == "module" and not parts):
            parts.append(head)
        children = dict(owner.named_children())
        if head not in children:
            parts += [tail] if tail else []
            break
        owner, rest = children[head], tail
    return ".".join(parts)
