"""Equal pipeline stages of a few transformer blocks: the time of a step is the schedule's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MakeLinear = Callable[[int, int], nn.Module]


@dataclasses.dataclass(frozen=True)
class Work:
    """Shape of a step.

    Attributes:
        blocks: transformer blocks of a pipeline rank.
        hidden: their width.
        heads: attention heads.
        seq: tokens of a sample.
        micro_batch: samples of a microbatch.
        microbatches: m.
    """

    blocks: int
    hidden: int
    heads: int
    seq: int
    micro_batch: int
    microbatches: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """What travels between stages: [b, s, h]."""
        return self.micro_batch, self.seq, self.hidden

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq * self.microbatches


WORK = {
    "tiny": Work(2, 32, 2, 16, 1, 8),
    "small": Work(6, 192, 6, 256, 2, 8),
}


class Block(nn.Module):
    """Attention and MLP, with linear layers of any make."""

    def __init__(self, work: Work, linear: MakeLinear) -> None:
        super().__init__()
        hidden, self.heads = work.hidden, work.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.up, self.down = linear(hidden, 4 * hidden), linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        mixed = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    """Blocks of one pipeline stage; it takes its input as an argument or by `set_input_tensor`."""

    def __init__(self, work: Work, blocks: int, seed: int, linear: MakeLinear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(work, linear) for _ in range(blocks))
        self.received: Tensor | None = None
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif param.dim() > 1:
                nn.init.normal_(param, 0.0, 0.02, generator=generator)

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self.received,) = tensors

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.received is None else self.received
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(output: Tensor, target: Tensor | None = None) -> Tensor:
    """A loss that costs next to nothing. torch passes a target that nothing is done with."""
    del target
    return output.square().mean()
