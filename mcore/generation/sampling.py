"""How the next token is chosen from a model's logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """A way to choose tokens.

    Attributes:
        greedy: the most likely token; the other options have no say.
        temperature: logits are divided by it; below 1 sharpens the distribution, above 1 flattens.
        top_k: only this many most likely tokens can be chosen; 0 = all.
        top_p: only the most likely tokens that together have this probability; 1 = all.

    Raises:
        ConfigError: a number out of range.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ConfigError(
                f"temperature is {self.temperature}; use a number above 0, or --greedy for the "
                "most likely token"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; use 1 or more, or 0 for all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; use a number above 0 and up to 1")


def choose_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token.

    Args:
        logits: [v], any float dtype; not modified.
        sampling: how to choose.
        generator: source of randomness, on the CPU; untouched when greedy.
    """
    if sampling.greedy:
        return int(logits.argmax())
    probabilities = kept_probabilities(logits, sampling)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def kept_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities to sample from, [v], float32 on the CPU; 0 for tokens that are cut off.

    Top-k cuts first. Top-p keeps tokens from the most likely on until their sum reaches p, the one
    that reaches it included, so at least one token is left.
    """
    scaled = logits.detach().cpu().float() / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        smallest = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    ordered, order = scaled.softmax(0).sort(descending=True)
    before = ordered.cumsum(0) - ordered  # probability of all tokens that are more likely
    ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
    return torch.zeros_like(ordered).scatter(0, order, ordered)
