"""One pre-norm transformer layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mcore.config.transformer import TransformerConfig
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.tensor_parallel.random import checkpoint
from mcore.transformer.attention import SelfAttention
from mcore.transformer.documents import AttentionMask
from mcore.transformer.dropout import DropoutState, Site, dropout, needed
from mcore.transformer.mlp import MLP
from mcore.transformer.norm import build_norm, without_keeping
from mcore.transformer.rotary import RotaryTables


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    Args:
        config: everything about the layer.
        layer_number: global number of the layer, from 0.
        tp_group: tensor-parallel group, this process's own when None.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 0,
        tp_group: AnyGroup | None = None,
    ) -> None:
        super().__init__()
        group = tensor_model_parallel_group_or(tp_group)
        self.tp_group = group
        self.layer_number = layer_number
        self.hidden_dropout = config.hidden_dropout
        self.sequence_parallel = config.sequence_parallel and group.size > 1
        partial = self.sequence_parallel
        self.input_layernorm = build_norm(
            config, config.hidden_size, group, partial_gradient=partial
        )
        self.self_attention = SelfAttention(config, layer_number, group)
        self.pre_mlp_layernorm = build_norm(
            config, config.hidden_size, group, partial_gradient=partial
        )
        self.mlp = MLP(config, group)
        self.recompute_norms = config.recomputes("layernorm")
        self.recompute_mlp = config.recomputes("mlp")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask = None,
        rotary: RotaryTables | None = None,
        dropout_state: DropoutState | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            hidden_states: [s, b, h], or [s/t, b, h] with sequence parallelism.
            attention_mask: True = hidden, broadcast to [b, n, s, s]; documents; None = causal.
            rotary: tables of the rotary embedding, or None.
            dropout_state: what dropout masks depend on; needed in training when dropout is on.

        Returns:
            Shaped as the input.
        """
        attended = self._apply_to_norm(
            self.input_layernorm,
            lambda normed: self.self_attention(normed, attention_mask, rotary, dropout_state),
            hidden_states,
        )
        hidden_states = hidden_states + self._drop(attended, dropout_state, Site.ATTENTION_OUTPUT)
        mixed = self._mlp(hidden_states)
        return hidden_states + self._drop(mixed, dropout_state, Site.MLP_OUTPUT)

    def _apply_to_norm(
        self, norm: nn.Module, consumer: Callable[[Tensor], Tensor], x: Tensor
    ) -> Tensor:
        if self.recompute_norms and self._keeps_activations:
            return without_keeping(norm, consumer, x)
        return consumer(norm(x))

    def _mlp(self, hidden_states: Tensor) -> Tensor:
        if not (self.recompute_mlp and self._keeps_activations):
            return self._apply_to_norm(self.pre_mlp_layernorm, self.mlp, hidden_states)
        output: Tensor
        if self.recompute_norms:
            output = checkpoint(lambda x: self.mlp(self.pre_mlp_layernorm(x)), False, hidden_states)
        else:
            output = checkpoint(self.mlp, False, self.pre_mlp_layernorm(hidden_states))
        return output

    @property
    def _keeps_activations(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _drop(self, x: Tensor, state: DropoutState | None, site: Site) -> Tensor:
        if not self.training or self.hidden_dropout == 0.0:
            return x
        first = self.tp_group.rank * x.shape[0] if self.sequence_parallel else 0
        return dropout(
            x,
            self.hidden_dropout,
            needed(state),
            layer=self.layer_number,
            site=site,
            first_position=first,
        )
