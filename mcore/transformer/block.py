"""A run of transformer layers: the part of the decoder that one pipeline stage holds."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mcore.config.transformer import TransformerConfig
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.tensor_parallel.random import checkpoint
from mcore.transformer.documents import AttentionMask
from mcore.transformer.dropout import DropoutState
from mcore.transformer.host_activations import saved_on_host
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
        full = config.recompute_granularity == "full"
        self.recompute_method = config.recompute_method if full else None
        self.recompute_num_layers = config.recompute_num_layers or 0
        self.distribute_saved_activations = config.distribute_saved_activations and group.size > 1
        self.cpu_offloading_num_layers = config.cpu_offloading_num_layers

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask = None,
        rotary: RotaryTables | None = None,
        dropout_state: DropoutState | None = None,
    ) -> Tensor:
        """Apply the layers; shapes as in `TransformerLayer`."""
        layers = list(self.layers)
        others = (attention_mask, rotary, dropout_state)
        for number, (group, is_recomputed) in enumerate(self._groups(layers)):
            if is_recomputed:
                distributed = self.distribute_saved_activations
                # The group is bound, not passed: the first argument is what may be distributed.
                run = partial(_run, group)
                hidden_states = checkpoint(run, distributed, hidden_states, *others)
            elif number < self.cpu_offloading_num_layers:
                with saved_on_host(group):
                    hidden_states = _run(group, hidden_states, *others)
            else:
                hidden_states = _run(group, hidden_states, *others)
        if self.final_layernorm is not None:
            hidden_states = self.final_layernorm(hidden_states)
        return hidden_states

    def _groups(self, layers: list[nn.Module]) -> list[tuple[list[nn.Module], bool]]:
        """Runs of layers, each with whether its activations are recomputed."""
        step = self.recompute_num_layers
        if self.recompute_method is None or not (self.training and torch.is_grad_enabled()):
            return [([layer], False) for layer in layers]
        if self.recompute_method == "uniform":
            return [(layers[i : i + step], True) for i in range(0, len(layers), step)]
        return [([layer], i < step) for i, layer in enumerate(layers)]


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
