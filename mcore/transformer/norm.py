"""LayerNorm and RMSNorm with their gradients declared for sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mcore.config.transformer import TransformerConfig
from mcore.topology.group import Group
from mcore.topology.param_sharding import replicated_sharding, set_sharding


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, which may be given the residual stream in a wider type than its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last channels; the result has the weights' type."""
        if input.dtype == self.weight.dtype:
            return super().forward(input)
        weight, bias = self.weight.to(input.dtype), self.bias.to(input.dtype)
        wide = F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
        return wide.to(self.weight.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, with statistics in float32 at least and any input type."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last channels; the result has the weights' type."""
        assert self.weight is not None
        dtype = torch.promote_types(x.dtype, torch.float32)
        if x.dtype == self.weight.dtype == dtype:
            return super().forward(x)
        weight = self.weight.to(dtype)
        wide = F.rms_norm(x.to(dtype), self.normalized_shape, weight, self.eps)
        return wide.to(self.weight.dtype)


def without_keeping(norm: nn.Module, consumer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """consumer(norm(x)), whose backward normalises x again rather than keep the result.

    What the consumer saves of its input is left out and made anew when it is asked for.
    """
    normed = norm(x)
    place, shape = normed.data_ptr(), normed.shape

    def pack(saved: Tensor) -> Tensor | None:
        is_input = saved.data_ptr() == place and saved.shape == shape
        return None if is_input else saved

    def unpack(saved: Tensor | None) -> Tensor:
        if saved is not None:
            return saved
        with torch.no_grad():
            again: Tensor = norm(x)
        return again

    with saved_tensors_hooks(pack, unpack):
        return consumer(normed)


def build_norm(
    config: TransformerConfig, size: int, tp_group: Group, *, partial_gradient: bool
) -> LayerNorm | RMSNorm:
    """The norm that the configuration asks for, over the last `size` channels.

    Its weights are replicated over the tensor-parallel group. torch computes the statistics in
    float32 for lower-precision inputs.

    Args:
        config: kind, epsilon and data type.
        size: channels.
        tp_group: tensor-parallel group.
        partial_gradient: each rank normalises only its part of the activations (of the sequence, or
            of the heads), so gradients have to be summed over the group.
    """
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    norm = kind(size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
    for param in norm.parameters():
        sharding = replicated_sharding((size,), tp_group, sequence_parallel=partial_gradient)
        set_sharding(param, sharding)
    return norm
