"""Rotary position embedding.

Source: Su et al. 2021 (arXiv:2104.09864); the pairing of channel i with i + d/2 is that of GPT-NeoX
and Hugging Face, neighbouring channels (`interleaved`) that of the paper.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcore.config.gpt import RotaryScaling
from mcore.errors import ShapeError


class RotaryTables(NamedTuple):
    """cos and sin of every (position, channel): [s, 1, 1, r] each, or [s, b, 1, r] by sample."""

    cos: Tensor
    sin: Tensor


class RotaryEmbedding(nn.Module):
    """Angles position x base^(-2i/r) for the first r = percent x d channels of each head.

    Args:
        kv_channels: size d of a head.
        rotary_percent: part of the channels that is rotated.
        rotary_interleaved: pair neighbouring channels rather than the two halves.
        rotary_base: base of the frequencies.
        scaling: how they are stretched; None = not at all.

    Raises:
        ShapeError: the rotated channels are not an even number of at least 2.
    """

    inv_freq: Tensor

    def __init__(
        self,
        kv_channels: int,
        *,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        rotary_base: float = 10000.0,
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__()
        self.rotated = int(kv_channels * rotary_percent)
        self.interleaved = rotary_interleaved
        if self.rotated < 2 or self.rotated % 2:
            raise ShapeError(
                f"rotary_percent {rotary_percent} of {kv_channels} channels is {self.rotated}; "
                "an even number of channels is needed"
            )
        channels = torch.arange(0, self.rotated, 2, dtype=torch.float32)
        inv_freq = 1.0 / (rotary_base ** (channels / self.rotated))
        if scaling is not None:
            inv_freq = _stretched(inv_freq, scaling)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(
        self, seq_length: int, dtype: torch.dtype, position_ids: Tensor | None = None
    ) -> RotaryTables:
        """Tables of a sequence, computed in float32 and returned in `dtype`.

        Args:
            seq_length: s.
            dtype: of the tables.
            position_ids: [b, s], positions of each sample; 0 .. s-1 when None.
        """
        if position_ids is None:
            positions = torch.arange(seq_length, device=self.inv_freq.device)[:, None]
        else:
            positions = position_ids.t()  # [b, s] -> [s, b]
        angles = positions.float()[..., None] * self.inv_freq  # [s, b or 1, r/2]
        if self.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat([angles, angles], dim=-1)
        angles = angles[:, :, None, :]
        return RotaryTables(angles.cos().to(dtype), angles.sin().to(dtype))

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Follow device moves, but keep the frequencies in float32 whatever the model's dtype."""
        before = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = before.to(self.inv_freq.device)
        return self


def apply_rotary(x: Tensor, tables: RotaryTables, interleaved: bool) -> Tensor:
    """Rotate the first channels of every head.

    Args:
        x: [s, b, n, d].
        tables: angles of the first r channels.
        interleaved: neighbouring channels are paired.

    Returns:
        [s, b, n, d].
    """
    rotated = tables.cos.shape[-1]
    turn, rest = x[..., :rotated], x[..., rotated:]
    turned = turn * tables.cos + _rotate_half(turn, interleaved) * tables.sin
    return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], dim=-1)


def _rotate_half(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([-odd, even], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _stretched(inv_freq: Tensor, scaling: RotaryScaling) -> Tensor:
    """Frequencies after stretching; see `RotaryScaling`."""
    if scaling.original_max_positions is None:
        return inv_freq / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq  # in this order, so that the last bit is that of others
    turns = scaling.original_max_positions / wavelength  # within the original length
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * inv_freq / scaling.factor + kept * inv_freq
