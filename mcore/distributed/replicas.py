"""Which parameters of a model chunk have gradients or copies on ranks that are not data-parallel.

Found once, when the chunk is wrapped; `finalize_model_grads` does the sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from mcore.errors import TopologyError
from mcore.topology.collectives import all_gather_object
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group
from mcore.topology.param_sharding import ParamSharding, global_named_parameters, sharding_of

Span = tuple[int, int]  # global start, length


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of a parameter that several tensor-parallel ranks hold, each with part of the gradient.

    Attributes:
        param: the parameter.
        dim: dimension that the rows run along.
        total: rows that are shared by any ranks; they are summed in a tensor of this many rows.
        places: for each run of shared rows here: start in the parameter, start among the shared
            rows, length.
    """

    param: nn.Parameter
    dim: int
    total: int
    places: tuple[tuple[int, int, int], ...]

    def pack(self, grad: Tensor) -> Tensor:
        """This rank's parts at their places among all shared rows, zero elsewhere."""
        shape = list(grad.shape)
        shape[self.dim] = self.total
        packed = grad.new_zeros(shape)
        for local, start, length in self.places:
            packed.narrow(self.dim, start, length).copy_(grad.narrow(self.dim, local, length))
        return packed

    def unpack_(self, grad: Tensor, packed: Tensor) -> None:
        """Put the sums back into the gradient."""
        for local, start, length in self.places:
            grad.narrow(self.dim, local, length).copy_(packed.narrow(self.dim, start, length))


@dataclass(frozen=True, slots=True)
class Replicas:
    """Parameters whose gradients have to be summed over other ranks than the data-parallel ones.

    Attributes:
        sequence_parallel: their gradient covers this rank's part of the sequence.
        shared_rows: some of their rows are held by several tensor-parallel ranks.
        tied_keys: global names of parameters that the first and last stage both have; every rank of
            the embedding group has a name here, whichever of its chunks has the parameter.
    """

    sequence_parallel: tuple[nn.Parameter, ...]
    shared_rows: tuple[SharedRows, ...]
    tied_keys: tuple[str, ...]


def find_replicas(module: nn.Module, context: ParallelContext) -> Replicas:
    """Find a chunk's parameters that need more than the data-parallel sum.

    Comm: host-side facts are gathered over the embedding group (if there is a pipeline) and, if the
        chunk has shared rows, over the tensor-parallel group. All members wrap as many chunks.
    """
    trained = [
        (param, sharding_of(param, context.tp))
        for _, param in global_named_parameters(module)
        if param.requires_grad
    ]
    partial = [p for p, s in trained if s.sequence_parallel] if context.tp.size > 1 else []
    copies = sorted({s.tied_key for _, s in trained if s.tied_key is not None})
    if context.embd is not None:
        copies = sorted({key for keys in all_gather_object(copies, context.embd) for key in keys})
    return Replicas(tuple(partial), _find_shared_rows(trained, context.tp), tuple(copies))


def _find_shared_rows(
    trained: list[tuple[nn.Parameter, ParamSharding]], group: Group
) -> tuple[SharedRows, ...]:
    shared = [(p, s) for p, s in trained if any(piece.is_shared for piece in s.pieces)]
    # Tensor-parallel ranks have the same layers: either all of them come here or none.
    if not shared or group.size == 1:
        return ()
    mine = [[(p.global_start, p.length) for p in s.pieces if p.is_shared] for _, s in shared]
    everyone = all_gather_object(mine, group)
    return tuple(
        _shared_rows(param, sharding, {span for spans in everyone for span in spans[i]})
        for i, (param, sharding) in enumerate(shared)
    )


def _shared_rows(param: nn.Parameter, sharding: ParamSharding, spans: set[Span]) -> SharedRows:
    starts: dict[Span, int] = {}
    total = end = 0
    for start, length in sorted(spans):
        if start < end:
            raise TopologyError(
                f"ranks share rows of a parameter of shape {list(sharding.global_shape)} in runs "
                f"that overlap in part: {sorted(spans)}"
            )
        starts[start, length] = total
        total, end = total + length, start + length
    places = tuple(
        (piece.local_start, starts[piece.global_start, piece.length], piece.length)
        for piece in sharding.pieces
        if piece.is_shared
    )
    return SharedRows(param, sharding.dim, total, places)
