"""Global gradient norm and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mcore.topology.collectives import all_reduce_
from mcore.topology.group import Group

# Sums of squares over this many elements are taken in fp32 and added in fp64: as fast as all in
# fp32, whose error over millions of elements shows in the fourth digit.
_CHUNK = 1024


def get_grad_norm(pieces: Iterable[Tensor], group: Group, device: torch.device) -> Tensor:
    """L2 norm of the whole model's gradient.

    Args:
        pieces: the gradients that this rank counts; over the group's ranks together each element of
            each logical parameter occurs once.
        group: tensor- and pipeline-parallel ranks, which hold one copy of the model.
        device: where the gradients are, also if there are none here.

    Returns:
        0-dim fp64, the same on all ranks. Not finite if any gradient is not.

    Comm: one all-reduce of one fp64 element over the group, op sum.
    """
    norms = [norm for piece in pieces for norm in _chunk_norms(piece)]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        total = torch.cat(norms).double().square().sum()
    return all_reduce_(total, group).sqrt()


def clip_grad_by_total_norm_(grads: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply gradients in place by max_norm / (norm + 1e-6) where that is below 1.

    Args:
        grads: all gradients of this rank.
        max_norm: largest allowed global norm.
        norm: the global norm, 0-dim; stays on its device.
    """
    factor = (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
    if grads:
        torch._foreach_mul_(list(grads), factor)


def _chunk_norms(piece: Tensor) -> Iterable[Tensor]:
    """L2 norms of runs of the piece, each 1-D, in at least fp32."""
    flat = piece.reshape(-1)
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rest = flat.numel() % _CHUNK
    runs, tail = flat[: flat.numel() - rest], flat[flat.numel() - rest :]
    if runs.numel():
        yield torch.linalg.vector_norm(runs.view(-1, _CHUNK), dim=1, dtype=dtype)
    if rest:
        yield torch.linalg.vector_norm(tail, dtype=dtype).reshape(1)
