"""Initial weights of a GPT model, drawn by name after it is built."""

from __future__ import annotations

from torch import nn

from mcore.config.transformer import TransformerConfig
from mcore.tensor_parallel.initialization import initialize_by_name_
from mcore.topology.group import Group
from mcore.topology.param_sharding import global_named_parameters, sharding_of

#: Weights that write to the residual stream start smaller (Radford et al. 2019).
_RESIDUAL = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")


def initialize_parameters_(
    model: nn.Module, config: TransformerConfig, seed: int, tp_group: Group
) -> None:
    """Fill every matrix with normal numbers that depend on (seed, name, position) alone.

    Vectors keep what their layers gave them: norms start at 1, biases at 0. A tied output layer
    draws the same numbers as the embedding, having the same name.
    """
    for name, param in global_named_parameters(model):
        if param.dim() < 2:
            continue
        residual = name.endswith(_RESIDUAL)
        std = config.output_init_std if residual else config.init_method_std
        initialize_by_name_(param, sharding_of(param, tp_group), name=name, seed=seed, std=std)
