"""A plain PyTorch GPT of the same shape, written so that torch's own parallel APIs apply to it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workload import Workload


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        # (head, q|k|v, channel) order, so that a cut of the columns keeps whole heads.
        mixed = self.qkv(x).view(b, s, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        q, k, v = mixed.unbind(0)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.ln2, self.mlp = nn.LayerNorm(hidden), MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class ReferenceGPT(nn.Module):
    """Some layers of the model, with embedding and (untied) head where asked."""

    def __init__(
        self, work: Workload, layers: range, embeds: bool = True, has_head: bool = True
    ) -> None:
        super().__init__()
        hidden = work.hidden
        self.tokens = nn.Embedding(work.vocab, hidden) if embeds else None
        self.positions = nn.Parameter(torch.empty(work.seq, hidden)) if embeds else None
        self.blocks = nn.ModuleList(Block(hidden, work.heads) for _ in layers)
        self.norm = nn.LayerNorm(hidden) if has_head else None
        self.head = nn.Linear(hidden, work.vocab, bias=False) if has_head else None
        for name, param in self.named_parameters():
            if param.dim() > 1:
                nn.init.normal_(param, 0.0, 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
