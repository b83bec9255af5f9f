"""What Hugging Face configurations say about rotary positions and sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore.convert.hf_family import require
from mcore.convert.model_options import ModelOptions
from mcore.errors import UnsupportedError


def rotary_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling of the rotary frequencies, as options.

    Transformers 5 has all in `rope_parameters`; version 4 had `rope_theta` and `rope_scaling`.

    Raises:
        UnsupportedError: a kind of scaling that mcore does not compute.
    """
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope |= {key: value for key, value in (config.get(name) or {}).items() if value is not None}
    require(rope, "partial_rotary_factor", 1.0)
    base = rope.get("rope_theta", config.get("rope_theta") or 10000.0)
    options: dict[str, Any] = {"rotary_base": float(base)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "linear":
        options["rotary_seq_len_interpolation_factor"] = float(rope["factor"])
    elif kind == "llama3":
        options["use_rope_scaling"] = True
        options["rope_scaling_factor"] = float(rope["factor"])
        options["rope_low_freq_factor"] = float(rope["low_freq_factor"])
        options["rope_high_freq_factor"] = float(rope["high_freq_factor"])
        options["rope_original_max_positions"] = int(rope["original_max_position_embeddings"])
    elif kind != "default":
        raise UnsupportedError(
            f"rope_type is {kind!r} in the Hugging Face configuration; models with default, linear "
            "and llama3 can be converted"
        )
    return options


def rotary_config(options: ModelOptions) -> dict[str, Any]:
    """Base and scaling in the spellings of transformers 4 and 5."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if options.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": options.rotary_seq_len_interpolation_factor}
    elif options.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": options.rope_scaling_factor,
            "low_freq_factor": options.rope_low_freq_factor,
            "high_freq_factor": options.rope_high_freq_factor,
            "original_max_position_embeddings": options.rope_original_max_positions,
        }
    config: dict[str, Any] = {"rope_theta": options.rotary_base}
    config["rope_parameters"] = scaling | {"rope_theta": options.rotary_base}
    if scaling["rope_type"] != "default":
        config["rope_scaling"] = scaling
    return config


def window_options(
    config: Mapping[str, Any], window: int | None, first_layer: int
) -> dict[str, Any]:
    """The sliding window, as options.

    Args:
        config: may list the kind of each layer.
        window: keys that a query sees, its own among them; None = no window.
        first_layer: first layer with the window, where the kinds are not listed.

    Raises:
        UnsupportedError: layers without the window follow layers with it.
    """
    kinds = config.get("layer_types")
    if kinds:
        sliding = [kind == "sliding_attention" for kind in kinds]
        if set(kinds) - {"sliding_attention", "full_attention"} or sliding != sorted(sliding):
            raise UnsupportedError(
                f"layer_types is {kinds}; models can be converted whose layers with a sliding "
                "window all come last"
            )
        first_layer = sliding.index(True) if True in sliding else len(sliding)
    if window is None or first_layer >= config["num_hidden_layers"]:
        return {}
    return {"sliding_window": int(window), "sliding_window_first_layer": first_layer}


def layer_types(options: ModelOptions) -> list[str]:
    """The kind of attention of each layer."""
    first = options.sliding_window_first_layer if options.is_windowed else options.num_layers
    return [
        "sliding_attention" if layer >= first else "full_attention"
        for layer in range(options.num_layers)
    ]
