"""Scaled dot-product attention over this rank's heads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore.transformer.documents import AttentionMask, PackedDocuments
from mcore.transformer.dropout import DropoutState, attention_dropout, needed


class DotProductAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v, causal unless a mask is given.

    torch's `scaled_dot_product_attention` does the work. Its dropout gives other masks when heads
    are dealt to ranks, so with dropout the softmax is spelled out here and the masks go by global
    head.

    Args:
        layer_number: global number of the layer, from 0.
        first_head: global number of this rank's first query head.
        dropout: probability that an attention weight is dropped in training.
        window: keys that a query sees at most, the last of them its own; None = all before it.
    """

    def __init__(
        self, layer_number: int, first_head: int, dropout: float, window: int | None = None
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.first_head = first_head
        self.dropout = dropout
        self.window = window

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask,
        dropout_state: DropoutState | None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, b, n, d].
            key: [k, b, g, d], g a divisor of n.
            value: [k, b, g, d].
            attention_mask: True = hidden, broadcast to [b, n, s, k]; documents that do not see each
                other (s = k); None = causal, the last query seeing every key.
            dropout_state: what dropout masks depend on; needed in training when dropout is on.

        Returns:
            [s, b, n * d].
        """
        grouped = key.shape[2] != query.shape[2]
        if self.window is not None and self.window < key.shape[0]:
            attention_mask = self._windowed(query, key, attention_mask)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, n, s, d]
        if self.training and self.dropout > 0.0:
            if isinstance(attention_mask, PackedDocuments):
                attention_mask = attention_mask.hidden()
            state = needed(dropout_state)
            out = self._spelled_out(q, k, v, attention_mask, state)
        elif isinstance(attention_mask, PackedDocuments):
            out = attention_mask.attend(q, k, v)
        elif attention_mask is None and q.shape[2] in (1, k.shape[2]):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=q.shape[2] > 1, enable_gqa=grouped
            )
        else:
            hidden = _causal(q, k) if attention_mask is None else attention_mask
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _windowed(self, query: Tensor, key: Tensor, attention_mask: AttentionMask) -> Tensor:
        """The mask with keys hidden that lie before the window; shapes as in `forward`."""
        assert self.window is not None
        queries, keys = query.shape[0], key.shape[0]
        places = torch.arange(keys - queries, keys, device=query.device)[:, None]
        distance = places - torch.arange(keys, device=query.device)  # [s, k]
        if isinstance(attention_mask, PackedDocuments):
            attention_mask = attention_mask.hidden()
        hidden = distance < 0 if attention_mask is None else attention_mask
        return hidden | (distance >= self.window)

    def _spelled_out(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        dropout_state: DropoutState,
    ) -> Tensor:
        if k.shape[1] != q.shape[1]:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        accumulation = torch.promote_types(q.dtype, torch.float32)
        if q.dtype == torch.float16:  # a product past 65504 would be infinite
            q, k = q.to(accumulation), k.to(accumulation)
        scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
        hidden = _causal(q, k) if attention_mask is None else attention_mask
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=accumulation)
        weights = attention_dropout(
            weights,
            self.dropout,
            dropout_state,
            layer=self.layer_number,
            first_head=self.first_head,
        )
        return weights.to(v.dtype) @ v


def _causal(q: Tensor, k: Tensor) -> Tensor:
    """[s, k] bool, True where a key lies in the future of a query."""
    queries, keys = q.shape[2], k.shape[2]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    return ~visible.tril(keys - queries)
