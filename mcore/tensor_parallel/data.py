"""Hand a batch that one tensor-parallel rank read to the others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mcore.device import current_device
from mcore.errors import DataError
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.topology.collectives import all_gather_object, broadcast_

Key = TypeVar("Key", bound=Hashable)


def broadcast_data(
    keys: Sequence[Key],
    data: Mapping[Key, Tensor] | None,
    datatype: torch.dtype,
    tp_group: AnyGroup | None = None,
) -> dict[Key, Tensor]:
    """Give every tensor-parallel rank the tensors that its first rank has.

    Args:
        keys: names to send, in the same order on every rank.
        data: the tensors; read on the first rank only (others may pass None).
        datatype: their dtype.
        tp_group: tensor-parallel group, this process's own when None.

    Returns:
        The tensors by name, in the first rank's shapes, on the current device.

    Comm: shapes as host objects, then one broadcast of all elements.

    Raises:
        DataError: on every rank, a key that is missing or of another dtype.
    """
    group = tensor_model_parallel_group_or(tp_group)
    problem, shapes = None, None
    if group.is_first:
        problem = _problem(keys, data or {}, datatype)
        if problem is None and data is not None:
            shapes = [tuple(data[key].shape) for key in keys]
    problem, shapes = all_gather_object((problem, shapes), group)[0]
    if problem is not None:
        raise DataError(problem)
    if not keys:
        return {}
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if group.is_first:
        assert data is not None
        flat = torch.cat([data[key].flatten() for key in keys])
    else:
        flat = torch.empty(sum(sizes), dtype=datatype)
    flat = flat.to(current_device())
    broadcast_(flat, group)
    parts = flat.split(sizes)
    return {key: part.view(shape) for key, part, shape in zip(keys, parts, shapes, strict=True)}


def _problem(keys: Sequence[Key], data: Mapping[Key, Tensor], datatype: torch.dtype) -> str | None:
    for key in keys:
        if key not in data:
            return f"batch has no {key!r}; it has {', '.join(sorted(map(str, data))) or 'nothing'}"
        if data[key].dtype != datatype:
            return f"{key!r} has dtype {data[key].dtype}, expected {datatype}"
    return None
