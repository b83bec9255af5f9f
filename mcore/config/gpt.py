"""What a GPT model adds to the transformer: embeddings and output head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import choose, flag
from mcore.errors import ConfigError

PositionEmbedding = Literal["learned_absolute", "rope", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """Embeddings and output head of a GPT model, with Megatron's names.

    Raises:
        ConfigError: a value that cannot be right.
    """

    max_position_embeddings: int | None = flag(
        None, model=True, help="Positions of the learned table; the sequence length when absent."
    )
    position_embedding_type: PositionEmbedding = flag(
        "learned_absolute", model=True, help="How positions enter the model."
    )
    rotary_base: float = flag(10000.0, model=True, help="Base of the rotary frequencies.")
    rotary_percent: float = flag(
        1.0, model=True, help="Part of each head's channels that is rotated, above 0 up to 1."
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, model=True, help="Give the output layer a matrix of its own."
    )

    def __post_init__(self) -> None:
        try:
            choose(
                self.position_embedding_type,
                ("learned_absolute", "rope", "none"),
                "position_embedding_type",
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if not 0.0 < self.rotary_percent <= 1.0:
            raise ConfigError(
                f"rotary_percent is {self.rotary_percent}; use a number above 0 and up to 1"
            )
