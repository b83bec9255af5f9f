"""Self-attention with heads dealt to tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mcore.config.transformer import TransformerConfig
from mcore.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mcore.tensor_parallel.random import checkpoint
from mcore.topology.group import Group
from mcore.topology.param_sharding import Piece, RowCut, even_rows
from mcore.transformer.documents import AttentionMask
from mcore.transformer.dot_product_attention import DotProductAttention
from mcore.transformer.dropout import DropoutState
from mcore.transformer.initialization import normal
from mcore.transformer.kv_cache import KeyValueCache
from mcore.transformer.norm import build_norm
from mcore.transformer.rotary import RotaryTables, apply_rotary


def qkv_rows(heads: int, groups: int, head_dim: int, tp_group: Group) -> RowCut:
    """How the rows of the QKV projection are dealt.

    The matrix holds, group by group, the query heads of the group, then its key, then its value.
    With at least as many groups as ranks each rank has whole groups. With fewer, the ranks of a
    group share out its query heads and each has a copy of its key and value rows; the first of
    them owns the copy.

    Source: the row order is Megatron's (checkpoint version 2.0 and later).
    """
    t, r = tp_group.size, tp_group.rank
    parts = (heads // groups * head_dim, head_dim, head_dim)
    rows_per_group = sum(parts)
    if groups >= t:
        return replace(even_rows(groups * rows_per_group, tp_group), parts=parts)
    ranks_per_group = t // groups
    group, part = divmod(r, ranks_per_group)
    query_rows = heads // t * head_dim
    start = group * rows_per_group
    query = Piece(0, start + part * query_rows, query_rows)
    key_value = Piece(
        query_rows,
        start + heads // groups * head_dim,
        2 * head_dim,
        is_owner=part == 0,
        is_shared=True,
    )
    return RowCut(groups * rows_per_group, query_rows + 2 * head_dim, (query, key_value), parts)


class SelfAttention(nn.Module):
    """Project to queries, keys and values, attend, project back.

    Args:
        config: sizes, biases, dropout.
        layer_number: global number of the layer, from 0.
        tp_group: tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, tp_group: Group) -> None:
        super().__init__()
        heads, groups, self.head_dim = (
            config.num_attention_heads,
            config.query_groups,
            config.head_dim,
        )
        self.num_heads = heads // tp_group.size
        self.num_groups = max(1, groups // tp_group.size)
        self.rotary_interleaved = config.rotary_interleaved
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (heads + 2 * groups) * self.head_dim,
            config=config,
            init_method=normal(config.init_method_std),
            bias=config.add_bias_linear or config.add_qkv_bias,
            row_cut=qkv_rows(heads, groups, self.head_dim, tp_group),
            tp_group=tp_group,
        )
        self.core_attention = DotProductAttention(
            layer_number,
            self.num_heads * tp_group.rank,
            config.attention_dropout,
            config.sliding_window if layer_number >= config.sliding_window_first_layer else None,
        )
        self.linear_proj = RowParallelLinear(
            heads * self.head_dim,
            config.hidden_size,
            config=config,
            init_method=normal(config.output_init_std),
            bias=config.add_bias_linear,
            input_is_parallel=True,
            tp_group=tp_group,
        )
        # Set while text is generated: new tokens then attend to those before them as well.
        self.cache: KeyValueCache | None = None
        self.recompute_core = config.recomputes("core_attn")
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_layernorm:
            # Each rank normalises its own heads, so these gradients are partial at any t > 1.
            partial = tp_group.size > 1
            self.q_layernorm = build_norm(config, self.head_dim, tp_group, partial_gradient=partial)
            self.k_layernorm = build_norm(config, self.head_dim, tp_group, partial_gradient=partial)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: AttentionMask = None,
        rotary: RotaryTables | None = None,
        dropout_state: DropoutState | None = None,
    ) -> Tensor:
        """Attend: [s, b, h] -> [s, b, h] ([s/t, b, h] with sequence parallelism)."""
        query, key, value = self._project(hidden_states)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if rotary is not None:
            query = apply_rotary(query, rotary, self.rotary_interleaved)
            key = apply_rotary(key, rotary, self.rotary_interleaved)
        if self.cache is not None:
            key, value = self.cache.append(key, value)
        inputs = (query, key, value, attention_mask, dropout_state)
        if self.recompute_core and self.training and torch.is_grad_enabled():
            context = checkpoint(self.core_attention, False, *inputs)
        else:
            context = self.core_attention(*inputs)
        output: Tensor = self.linear_proj(context)[0]
        return output

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[s(/t), b, h] -> query [s, b, n/t, d], key and value [s, b, g/t, d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        s, b, _ = mixed.shape
        d, g = self.head_dim, self.num_groups
        query_rows = self.num_heads // g * d
        query, key, value = mixed.view(s, b, g, query_rows + 2 * d).split(
            [query_rows, d, d], dim=-1
        )
        return query.reshape(s, b, self.num_heads, d), key, value
