"""LayerNorm and RMSNorm with their gradients declared for sequence parallelism."""

from __future__ import annotations

from torch import nn

from mcore.config.transformer import TransformerConfig
from mcore.topology.group import Group
from mcore.topology.param_sharding import replicated_sharding, set_sharding


def build_norm(
    config: TransformerConfig, size: int, tp_group: Group, *, partial_gradient: bool
) -> nn.LayerNorm | nn.RMSNorm:
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
    kind = nn.LayerNorm if config.normalization == "LayerNorm" else nn.RMSNorm
    norm = kind(size, eps=config.layernorm_epsilon, dtype=config.params_dtype)
    for param in norm.parameters():
        sharding = replicated_sharding((size,), tp_group, sequence_parallel=partial_gradient)
        set_sharding(param, sharding)
    return norm
