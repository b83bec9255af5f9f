"""The one layer that GPT models are built of, under Megatron's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Names a kind of layer; mcore has one, whose norms are modules of their own."""

    name: str


def get_gpt_layer_local_spec() -> LayerSpec:
    """The layer built of mcore's own modules (Megatron's "local" spec)."""
    return LayerSpec("local")
