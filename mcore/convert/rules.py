"""How parameters of another program become ours and back: one table, read in both directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore.convert.model_options import ModelOptions


def _only(parts: list[Tensor]) -> Tensor:
    return parts[0]


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of ours and those that it is made of elsewhere.

    Attributes:
        name: our name.
        sources: the other names.
        join: makes ours of the others.
        split: makes the others of ours.
    """

    name: str
    sources: tuple[str, ...]
    join: Callable[[list[Tensor]], Tensor] = _only
    split: Callable[[Tensor], list[Tensor]] = _alone


def transposed(name: str, source: str) -> Rule:
    """A matrix that is stored the other way round ([in, out] instead of [out, in])."""
    return Rule(name, (source,), lambda parts: parts[0].T, lambda tensor: [tensor.T])


def stacked(name: str, *sources: str) -> Rule:
    """Matrices of equal shape, one above the other."""
    return Rule(name, sources, torch.cat, lambda tensor: list(tensor.chunk(len(sources))))


def group_qkv(query: Tensor, key: Tensor, value: Tensor, options: ModelOptions) -> Tensor:
    """Query, key and value rows, query group by query group.

    Args:
        query: [n d, ...] with n heads of size d.
        key: [g d, ...] with g query groups.
        value: [g d, ...].
        options: says n, g and d.

    Returns:
        [(n + 2 g) d, ...]: for each group its n / g query heads, its key, its value.
    """
    groups = options.num_query_groups
    parts = [part.reshape(groups, -1, *part.shape[1:]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def ungroup_qkv(qkv: Tensor, options: ModelOptions) -> list[Tensor]:
    """The inverse of `group_qkv`: query, key and value."""
    head = options.kv_channels
    per_group = options.num_attention_heads // options.num_query_groups * head
    grouped = qkv.reshape(options.num_query_groups, per_group + 2 * head, *qkv.shape[1:])
    return [part.flatten(0, 1) for part in grouped.split([per_group, head, head], dim=1)]
