"""A run of transformer layers: the part of the decoder that one pipeline stage holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mcore.config.transformer import TransformerConfig
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.tensor_parallel.random import checkpoint
from mcore.transformer.documents import AttentionMask
from mcore.transformer.dropout import DropoutState
from mcore.transformer.layer import TransformerLayer
from mcore.transformer.norm import build_norm
from mcore.transformer.rotary import RotaryTables


class TransformerBlock(nn.Module):
    """Layers `layer_range` of the decoder, and the final norm on the last stage.

    Args:
        config: everything about the layers.
        layer_range: global numbers of the layers; all of them when None.
        post_layer_norm: whether the final norm follows.
        tp_group: tensor-parallel group, this process's own when None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_range: range | None = None,
        post_layer_norm: bool = True,
        tp_group: AnyGroup | None = None,
    ) -> None:
        super().__init__()
        group = tensor_model_parallel_group_or(tp_group)
        numbers = range(config.num_layers) if layer_range is None else layer_range
        self.layer_offset = numbers.start
        self.layers = nn.ModuleList(TransformerLayer(config, n, group) for n in numbers)
        self.final_layernorm = None
        if post_layer_norm:
            self.final_layernorm = build_norm(
                config,
                config.hidden_size,
                group,
                partial_gradient=config.sequence_parallel and group.size > 1,
            )
        self.recompute_num_layers = (
            config.recompute_num_layers if config.recompute_granularity == "full" else None
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask = None,
        rotary: RotaryTables | None = None,
        dropout_state: DropoutState | None = None,
    ) -> Tensor:
        """Apply the layers; shapes as in `TransformerLayer`."""
        step = self.recompute_num_layers
        if step is None or not (self.training and torch.is_grad_enabled()):
            step = 0
        layers = list(self.layers)
        if step:
            for first in range(0, len(layers), step):
                group = layers[first : first + step]
                hidden_states = checkpoint(
                    _run, False, group, hidden_states, attention_mask, rotary, dropout_state
                )
        else:
            hidden_states = _run(layers, hidden_states, attention_mask, rotary, dropout_state)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states


def _run(
    layers: list[nn.Module],
    hidden_states: Tensor,
    attention_mask: AttentionMask,
    rotary: RotaryTables | None,
    dropout_state: DropoutState | None,
) -> Tensor:
    for layer in layers:
        hidden_states = layer(hidden_states, attention_mask, rotary, dropout_state)
    return hidden_states
