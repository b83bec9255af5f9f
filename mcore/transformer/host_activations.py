"""Activations of some layers kept in host memory from forward to backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mcore.device import host_copy, is_on_host


def saved_on_host(
    layers: Sequence[nn.Module], is_there: Callable[[Tensor], bool] = is_on_host
) -> saved_tensors_hooks:
    """A context in which what layers save for their backward is kept in pinned host memory.

    Weights, and views of them, stay where they are: they are there for the backward anyway, and
    each microbatch would copy them once more.

    Args:
        layers: what runs in the context.
        is_there: whether a tensor is in host memory already, and stays as well.
    """

    def keep(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
        if is_there(tensor) or _memory(tensor) in _weights(layers):
            return tensor
        return tensor.device, host_copy(tensor)

    def bring_back(kept: tuple[torch.device, Tensor] | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, copied = kept
        return copied.to(device, non_blocking=True)

    return saved_tensors_hooks(keep, bring_back)


def _weights(layers: Sequence[nn.Module]) -> set[int]:
    """Where the weights lie now: with ZeRO-3 a layer has them only while it runs."""
    params = (param for layer in layers for param in layer.parameters())
    return {_memory(param) for param in params if type(param) is nn.Parameter}  # no mere shard


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
