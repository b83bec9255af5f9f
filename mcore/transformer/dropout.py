"""Stateless dropout: a mask element is a function of what it masks, not of who computes it.

Whether an element is dropped depends on (seed, iteration, sample, layer, site, position) through a
counter-based hash. A rank generates just its own slice of the mask, so every layout drops the same
elements, recomputation replays them for free, and a resumed run needs no random state for them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from mcore.errors import ConfigError


class Site(IntEnum):
    """Where in a layer a mask is used; each site has a stream of its own."""

    EMBEDDING = 0
    ATTENTION_OUTPUT = 1
    MLP_OUTPUT = 2
    ATTENTION_WEIGHTS = 3


@dataclass(frozen=True, slots=True)
class DropoutState:
    """What the masks of one micro batch depend on.

    Attributes:
        seed: the run's seed.
        iteration: number of the optimizer step.
        sample_index: [b] int64, the position of each sample in the training stream, so that masks
            do not depend on which rank or micro batch computes a sample.
    """

    seed: int
    iteration: int
    sample_index: Tensor


def dropout(
    x: Tensor,
    probability: float,
    state: DropoutState,
    *,
    layer: int,
    site: Site,
    first_position: int = 0,
) -> Tensor:
    """Zero elements of x with a probability and scale the others by 1 / (1 - probability).

    Args:
        x: [s', b, h], a part of the sequence that starts at `first_position`.
        probability: chance that an element is dropped.
        state: seed, iteration and samples.
        layer: global layer number.
        site: which mask of the layer.
        first_position: position in the sequence of x's first row.
    """
    if probability == 0.0:
        return x
    length, _, hidden = x.shape
    rows = torch.arange(first_position, first_position + length, device=x.device)
    counter = rows.view(-1, 1, 1) * hidden + torch.arange(hidden, device=x.device)
    keys = _keys(state, layer, site).to(x.device).view(1, -1, 1)
    return _drop(x, probability, counter, keys)


def needed(state: DropoutState | None) -> DropoutState:
    """The state, where dropout is applied.

    Raises:
        ConfigError: there is none.
    """
    if state is None:
        raise ConfigError(
            "dropout in training needs a DropoutState, which its masks depend on; give the module "
            "one as dropout_state, or set hidden_dropout and attention_dropout to 0"
        )
    return state


def attention_dropout(
    weights: Tensor, probability: float, state: DropoutState, *, layer: int, first_head: int
) -> Tensor:
    """Drop attention weights, with masks by global head.

    Args:
        weights: [b, n', s, s], this rank's heads, which start at global head `first_head`.
        probability: chance that a weight is dropped.
        state: seed, iteration and samples.
        layer: global layer number.
        first_head: global number of the first head.
    """
    if probability == 0.0:
        return weights
    _, heads, queries, keys_length = weights.shape
    device = weights.device
    rows = torch.arange(queries, device=device).view(-1, 1)
    counter = rows * keys_length + torch.arange(keys_length, device=device)
    head = torch.arange(first_head, first_head + heads, device=device).view(1, -1, 1, 1)
    sample = _keys(state, layer, Site.ATTENTION_WEIGHTS).to(device).view(-1, 1, 1, 1)
    return _drop(weights, probability, counter, _mix64(sample + (head + 1) * _GOLDEN))


def _drop(x: Tensor, probability: float, counter: Tensor, keys: Tensor) -> Tensor:
    bits = _hash32(counter, keys)
    # int32 covers [-2^31, 2^31) evenly, so the lowest `probability` of that range is dropped.
    keep = bits >= int(probability * 2**32) - 2**31
    return torch.where(
        keep, x * (1.0 / (1.0 - probability)), torch.zeros((), dtype=x.dtype, device=x.device)
    )


#: 2^64 divided by the golden ratio, as a signed number (the increment of SplitMix64).
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _keys(state: DropoutState, layer: int, site: Site) -> Tensor:
    """[b] int64: one key for each sample."""
    text = f"{state.seed}/{state.iteration}/{layer}/{int(site)}".encode()
    base = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    return _mix64(state.sample_index * _GOLDEN + base)


def _mix64(x: Tensor) -> Tensor:
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014), on int64 that wrap around."""
    x = (x ^ _shift(x, 30, 64)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27, 64)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31, 64)


def _shift(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical right shift: torch's own copies the sign."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _hash32(counter: Tensor, keys: Tensor) -> Tensor:
    """int32 hash of every counter under every key (broadcast against each other).

    Three rounds of multiply and shift with the constants of `triple32` (Wellons 2018); half of the
    key enters before the first round and half in the middle, so that two keys never give one stream
    shifted.
    """
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    x = counter.to(torch.int32) ^ low
    x ^= _shift(x, 17, 32)
    x *= 0xED5AD4BB - 2**32
    x ^= _shift(x, 11, 32)
    x += high
    x *= 0xAC4C1B51 - 2**32
    x ^= _shift(x, 15, 32)
    x *= 0x31848BAB
    x ^= _shift(x, 14, 32)
    return x
