"""Rotary positions against the paper's formula, written out."""

import math

import pytest
import torch

from mcore.transformer.rotary import RotaryEmbedding, apply_rotary

S, B, N, D, BASE = 7, 2, 3, 8, 500.0


def turned(x, rotated, pairs):
    """Each pair (x_a, x_b) turned by position x base^(-2i / rotated)."""
    y = x.clone()
    for position in range(S):
        for i, (a, b) in enumerate(pairs):
            angle = position * BASE ** (-2 * i / rotated)
            first, second = x[position, ..., a], x[position, ..., b]
            y[position, ..., a] = first * math.cos(angle) - second * math.sin(angle)
            y[position, ..., b] = first * math.sin(angle) + second * math.cos(angle)
    return y


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [True, False])
def test_formula(percent, interleaved):
    rotated = int(D * percent)
    half = rotated // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    x = torch.randn(S, B, N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotary = RotaryEmbedding(
        D, rotary_percent=percent, rotary_interleaved=interleaved, rotary_base=BASE
    )
    found = apply_rotary(x, rotary(S, torch.float64), interleaved)
    # Angles are computed in float32.
    torch.testing.assert_close(found, turned(x, rotated, pairs), rtol=0, atol=3e-6)
    assert torch.equal(found[..., rotated:], x[..., rotated:])
