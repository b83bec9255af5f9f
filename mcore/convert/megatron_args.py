"""The options of a model as Megatron's argument namespace spells them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from mcore.convert.model_options import ModelOptions
from mcore.errors import CheckpointError, UnsupportedError

#: What mcore does not compute, by the value that means "not used".
_UNUSED = {
    "num_experts": None,
    "multi_latent_attention": False,
    "apply_layernorm_1p": False,
    "squared_relu": False,
    "apply_residual_connection_post_layernorm": False,
    "mtp_num_layers": None,
    "normalization_before_bias": False,
    "qk_clip": False,
    "is_hybrid_model": False,
    # These change what is computed and no shape, so nothing else would tell.
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "layernorm_zero_centered_gamma": False,
    "use_mup": False,
}


def options_from_args(args: Any, vocab_size: int | None = None) -> ModelOptions:
    """Options of the model that a namespace describes.

    Args:
        args: the namespace of a run, or an inert copy of it.
        vocab_size: token ids that exist. When None the namespace's, or the padded number.

    Raises:
        CheckpointError: an option is absent.
        UnsupportedError: the model has something that mcore does not compute.
    """
    values: Mapping[str, Any] = args if isinstance(args, Mapping) else vars(args)
    for name, unused in _UNUSED.items():
        if values.get(name) not in (None, False, 0, unused):
            raise UnsupportedError(f"the model has {name} = {values[name]!r}, which mcore lacks")
    try:
        return ModelOptions.from_mapping(_named(values, vocab_size))
    except KeyError as error:
        raise CheckpointError(f"the arguments in the checkpoint lack {error}") from error


def _named(values: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    gated = bool(values.get("swiglu") or values.get("glu_activation") == "swiglu")
    if values.get("glu_activation") not in (None, "swiglu"):
        raise UnsupportedError(f"glu_activation is {values['glu_activation']!r}; swiglu is read")
    bias = values.get("add_bias_linear", True)
    fused = bool(values.get("bias_gelu_fusion")) and bias and not gated  # it is the tanh form
    names = {field.name for field in dataclasses.fields(ModelOptions)}
    options = {name: values[name] for name in names if values.get(name) is not None}
    groups = values.get("num_query_groups") if values.get("group_query_attention") else None
    groups = groups or values.get("num_key_value_heads")
    padded = values["padded_vocab_size"]
    stated = vocab_size or _vocabulary(values) or padded
    if stated > padded:
        raise CheckpointError(f"the vocabulary of {stated} is larger than the {padded} rows stored")
    return options | {
        "num_query_groups": groups or values["num_attention_heads"],
        "group_query_attention": bool(groups),
        "vocab_size": stated,
        "position_embedding_type": _positions(values),
        "normalization": _normalization(values),
        "norm_epsilon": values.get("norm_epsilon", values.get("layernorm_epsilon", 1e-5)),
        "rotary_base": float(values.get("rotary_base") or values.get("rope_theta") or 10000.0),
        "swiglu": gated,
        "openai_gelu": bool(values.get("openai_gelu")) or fused,
        "add_bias_linear": bias,
        "sliding_window": _window(values),
        "max_position_embeddings": values.get("max_position_embeddings") or values["seq_length"],
    }


def _vocabulary(values: Mapping[str, Any]) -> int | None:
    """Token ids that exist.

    A NullTokenizer without an option for its end of document has that beyond `vocab_size`; since
    Megatron-LM has the option, it is among them.
    """
    stated = values.get("vocab_size")
    is_old_null = (
        values.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in values
    )
    return stated + 1 if stated and is_old_null else stated


def _positions(values: Mapping[str, Any]) -> str:
    kind = values.get("position_embedding_type")
    if kind is None:
        rotary = values.get("use_rotary_position_embeddings")
        learned = values.get("add_position_embedding", True)
        kind = "rope" if rotary else "learned_absolute" if learned else "none"
    kind = {"rotary": "rope"}.get(kind, kind)
    if kind not in ("rope", "learned_absolute", "none"):
        raise UnsupportedError(f"position_embedding_type is {kind!r}, which mcore lacks")
    if kind == "learned_absolute" and values.get("use_rotary_position_embeddings"):
        return "rope"
    return str(kind)


def _normalization(values: Mapping[str, Any]) -> str:
    kind = str(values.get("normalization") or "LayerNorm")
    return {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}.get(kind.lower(), kind)


def _window(values: Mapping[str, Any]) -> int | None:
    """Megatron counts the keys before a query, without its own."""
    window = values.get("window_size")
    if window is None or window[0] < 0:
        return None
    if values.get("window_attn_skip_freq") is not None:
        raise UnsupportedError("window_attn_skip_freq: all layers have the window or none")
    return int(window[0]) + 1


def args_from_options(options: ModelOptions, **more: Any) -> argparse.Namespace:
    """A namespace that describes a model.

    Args:
        options: of the model.
        **more: further members.

    Raises:
        UnsupportedError: Megatron has no spelling for an option.
    """
    if options.is_windowed and options.sliding_window_first_layer:
        raise UnsupportedError("sliding_window_first_layer: Megatron has the window in all layers")
    if options.use_rope_scaling and (
        options.rope_low_freq_factor,
        options.rope_high_freq_factor,
        options.rope_original_max_positions,
    ) != (1.0, 4.0, 8192):
        raise UnsupportedError(
            "Megatron's use_rope_scaling has low_freq_factor 1, high_freq_factor 4 and 8192 "
            "original positions, and this model has others"
        )
    values = options.as_dict()
    window = values.pop("sliding_window")
    values["window_size"] = (window - 1, 0) if options.is_windowed else None
    values["add_position_embedding"] = options.position_embedding_type == "learned_absolute"
    values["num_query_groups"] = options.num_query_groups
    values["bias_gelu_fusion"] = False
    return argparse.Namespace(**(values | more))


def tokenizer_args(options: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's options say of the tokenizer; Megatron's arguments spell it alike."""
    names = ["tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"]
    said: dict[str, Any] = {}
    if options.get("tokenizer_type") == "NullTokenizer":
        # Always said: without it `vocab_size` would have another meaning.
        said["null_tokenizer_eod_id"] = options["vocab_size"] - 1
        names += ["null_tokenizer_eod_id", "null_tokenizer_pad_id"]
    return said | {name: options[name] for name in names if options.get(name) is not None}
