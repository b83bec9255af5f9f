"""What a GPT model adds to the transformer: embeddings and output head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import flag, not_one_of, refuse

PositionEmbedding = Literal["learned_absolute", "rope", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryScaling:
    """How rotary frequencies are stretched for sequences longer than those first trained on.

    Wavelengths of at least `original_max_positions / low_freq_factor` positions become `factor`
    times longer, those of at most `original_max_positions / high_freq_factor` stay, and those
    between are blended (Llama 3.1's rule). Without `original_max_positions` all become longer,
    which is the same as dividing positions by `factor`.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int | None = None


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
    rotary_seq_len_interpolation_factor: float | None = flag(
        None, model=True, help="Divide rotary positions by this (linear scaling)."
    )
    use_rope_scaling: bool = flag(
        False, model=True, help="Stretch long rotary wavelengths as Llama 3.1 does."
    )
    rope_scaling_factor: float = flag(
        8.0, model=True, help="How much longer the long wavelengths become."
    )
    rope_low_freq_factor: float = flag(
        1.0,
        model=True,
        help="Wavelengths above --rope-original-max-positions / this are stretched in full.",
    )
    rope_high_freq_factor: float = flag(
        4.0,
        model=True,
        help="Wavelengths below --rope-original-max-positions / this are not stretched.",
    )
    rope_original_max_positions: int = flag(
        8192, model=True, help="Longest sequence before the stretching."
    )
    untie_embeddings_and_output_weights: bool = flag(
        False, model=True, help="Give the output layer a matrix of its own."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_one_of(
            self.position_embedding_type,
            ("learned_absolute", "rope", "none"),
            "position_embedding_type",
        )
        if not self.rotary_base > 0.0:
            yield f"rotary_base is {self.rotary_base}; use a number above 0"
        if not 0.0 < self.rotary_percent <= 1.0:
            yield f"rotary_percent is {self.rotary_percent}; use a number above 0 and up to 1"
        yield from self._wrong_scaling()

    def _wrong_scaling(self) -> Iterator[str]:
        linear = self.rotary_seq_len_interpolation_factor
        if linear is not None and self.use_rope_scaling:
            yield (
                "rotary_seq_len_interpolation_factor and use_rope_scaling exclude each other; drop "
                "one"
            )
        if (linear is not None or self.use_rope_scaling) and self.position_embedding_type != "rope":
            yield "scaling of rotary positions needs position_embedding_type rope"
        for name in (
            "rotary_seq_len_interpolation_factor",
            "rope_scaling_factor",
            "rope_low_freq_factor",
            "rope_original_max_positions",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"{name} is {value}; use a number above 0"
        if not self.rope_high_freq_factor > self.rope_low_freq_factor:
            yield (
                f"rope_high_freq_factor ({self.rope_high_freq_factor}) must be above "
                f"rope_low_freq_factor ({self.rope_low_freq_factor})"
            )

    @property
    def rotary_scaling(self) -> RotaryScaling | None:
        """How rotary frequencies are stretched; None = not at all."""
        if self.rotary_seq_len_interpolation_factor is not None:
            return RotaryScaling(factor=self.rotary_seq_len_interpolation_factor)
        if not self.use_rope_scaling:
            return None
        return RotaryScaling(
            factor=self.rope_scaling_factor,
            low_freq_factor=self.rope_low_freq_factor,
            high_freq_factor=self.rope_high_freq_factor,
            original_max_positions=self.rope_original_max_positions,
        )
