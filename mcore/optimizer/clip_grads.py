"""Global gradient norm and clipping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mcore.optimizer.gradients import at_once
from mcore.topology.collectives import all_reduce_
from mcore.topology.group import Group

# Sums of squares over this many elements are taken in fp32 and added in fp64: as fast as all in
# fp32, whose error over millions of elements shows in the fourth digit.
_CHUNK = 1024


def get_grad_norm(
    pieces: Iterable[Tensor], groups: Sequence[Group], device: torch.device
) -> Tensor:
    """L2 norm of the whole model's gradient.

    Args:
        pieces: the gradients that this rank counts; over the groups' ranks together each element of
            each logical parameter occurs once.
        groups: axes whose ranks together hold one copy of the gradient: tensor- and
            pipeline-parallel ranks, and the data-parallel ranks that gradients are dealt to.
        device: where the gradients are, also if there are none here.

    Returns:
        0-dim fp64, the same on all ranks. Not finite if any gradient is not.

    Comm: for each group one all-reduce of one fp64 element, op sum.
    """
    norms = [norm for piece in pieces for norm in _chunk_norms(piece)]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        total = torch.cat(norms).double().square().sum()
    for group in groups:
        all_reduce_(total, group)
    return total.sqrt()


def clip_factor(
    max_norm: float, norm: Tensor, inverse_scale: Tensor | None = None
) -> Tensor | None:
    """What to multiply gradients by: max_norm / (norm + 1e-6) where that is below 1.

    Args:
        max_norm: largest allowed global norm; 0 = no limit.
        norm: the global norm of the unscaled gradient, 0-dim; stays on its device.
        inverse_scale: what also has to be multiplied by: 1 / loss scale, 0-dim.

    Returns:
        The factor, 0-dim; None = 1.
    """
    if max_norm <= 0:
        return inverse_scale
    clip = (max_norm / (norm + 1.0e-6)).clamp(max=1.0)
    return clip if inverse_scale is None else clip * inverse_scale


def _chunk_norms(piece: Tensor) -> Iterable[Tensor]:
    """L2 norms of runs of the piece, each 1-D, in at least fp32.

    Some kernels widen the whole of their input first, so they are given a part at a time.
    """
    flat = piece.reshape(-1)
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rest = flat.numel() % _CHUNK
    runs, tail = flat[: flat.numel() - rest].view(-1, _CHUNK), flat[flat.numel() - rest :]
    rows = len(runs) if flat.dtype == dtype else max(1, at_once(flat.numel()) // _CHUNK)
    for start in range(0, len(runs), rows or 1):
        yield torch.linalg.vector_norm(runs[start : start + rows], dim=1, dtype=dtype)
    if rest:
        yield torch.linalg.vector_norm(tail, dtype=dtype).reshape(1)
