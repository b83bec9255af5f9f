"""Which elements of which global tensor every rank holds, and whether all who hold one agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mcore.distributed import ParamPart
from mcore.training.setup import TrainState

Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, global shape, place, elements


def held_elements(state: TrainState) -> list[Piece]:
    """Parameters and optimizer state of this rank, copies included, with their global places."""
    pieces: list[Piece] = []
    for chunk in state.chunks:
        for part in chunk.held_parts():
            pieces += _placed(part.name, part, part.data)
    for part, tensors in state.optimizer.state_parts():
        for kind, tensor in tensors.items():
            pieces += _placed(f"{kind} of {part.name}", part, tensor)
    return pieces


def _placed(name: str, part: ParamPart, tensor: Tensor) -> Iterator[Piece]:
    for place, view in part.run.views(tensor, part.sharding, owned_only=False):
        yield name, part.sharding.global_shape, place, view.detach().clone()


def count_copies(ranks: Iterable[list[Piece]]) -> dict[str, set[int]]:
    """By name, how many ranks hold an element; every element has to be the same bits on all."""
    values: dict[str, Tensor] = {}
    holders: dict[str, Tensor] = {}
    for rank, pieces in enumerate(ranks):
        for name, shape, place, tensor in pieces:
            whole = values.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            count = holders.setdefault(name, torch.zeros(shape, dtype=torch.int64))
            spans = zip(place, tensor.shape, strict=True)
            box: Any = tuple(slice(start, start + length) for start, length in spans)
            seen = count[box] > 0
            assert torch.equal(whole[box][seen], tensor[seen]), f"{name} at {place} on rank {rank}"
            whole[box] = tensor
            count[box] += 1
    return {name: set(count.unique().tolist()) for name, count in holders.items()}
