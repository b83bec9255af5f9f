"""The feed-forward part of a transformer layer."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mcore.config.transformer import TransformerConfig
from mcore.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mcore.topology.group import Group
from mcore.topology.param_sharding import even_rows
from mcore.transformer.initialization import normal


class MLP(nn.Module):
    """y = fc2(act(fc1(x))); with SwiGLU fc1 makes gate and up, and act is silu(gate) x up.

    fc1 is column parallel (gate and up are each dealt to the ranks), fc2 row parallel.

    Args:
        config: sizes, activation, biases.
        tp_group: tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, tp_group: Group) -> None:
        super().__init__()
        self.gated = config.gated_linear_unit
        self.approximate = "tanh" if config.openai_gelu else "none"
        blocks = 2 if self.gated else 1
        size = blocks * config.ffn_size
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            size,
            config=config,
            init_method=normal(config.init_method_std),
            bias=config.add_bias_linear,
            row_cut=even_rows(size, tp_group, blocks=blocks),
            tp_group=tp_group,
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_size,
            config.hidden_size,
            config=config,
            init_method=normal(config.output_init_std),
            bias=config.add_bias_linear,
            input_is_parallel=True,
            tp_group=tp_group,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Apply the MLP: [s, b, h] -> [s, b, h] ([s/t, b, h] with sequence parallelism)."""
        x, _ = self.linear_fc1(hidden_states)  # [s, b, f/t], gated [s, b, 2f/t]
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate) * up
        else:
            x = F.gelu(x, approximate=self.approximate)
        output: Tensor = self.linear_fc2(x)[0]
        return output
