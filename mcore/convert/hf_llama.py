"""The Hugging Face families like `llama`: Llama, Mistral, Qwen2, Qwen3 (...ForCausalLM)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mcore.convert.hf_family import HfFamily, require
from mcore.convert.hf_rotary import layer_types, rotary_config, rotary_options, window_options
from mcore.convert.model_options import ModelOptions
from mcore.convert.rules import Rule, group_qkv, stacked, ungroup_qkv
from mcore.errors import UnsupportedError


class Llama(HfFamily):
    """Rotary positions, RMSNorm, SwiGLU, grouped queries; biases everywhere or nowhere."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    prefix = "model."
    buffers = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

    def options(self, config: Mapping[str, Any]) -> ModelOptions:
        """The options that compute what a configuration describes."""
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedError(
                f"hidden_act is {activation!r}; {self.model_type} models with silu can be converted"
            )
        require(config, "partial_rotary_factor", 1.0)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        values: dict[str, Any] = {
            "num_layers": config["num_hidden_layers"],
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "kv_channels": config.get("head_dim") or hidden // heads,
            "ffn_hidden_size": config["intermediate_size"],
            "vocab_size": config["vocab_size"],
            "max_position_embeddings": config.get("max_position_embeddings", 2048),
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "swiglu": True,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
            "hidden_dropout": 0.0,
            "attention_dropout": config.get("attention_dropout") or 0.0,
        }
        values |= rotary_options(config)
        return ModelOptions(**(values | self.own_options(config)))

    def own_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What this family has and the others lack."""
        require(config, "sliding_window", None)
        biases = (config.get("attention_bias", False), config.get("mlp_bias", False))
        if biases[0] != biases[1]:
            raise UnsupportedError(
                f"attention_bias ({biases[0]}) and mlp_bias ({biases[1]}) differ, and mcore has "
                "one option (add_bias_linear) for both"
            )
        return {"add_bias_linear": biases[0]}

    def misfits(self, options: ModelOptions) -> list[str]:
        """Options of a model that this family cannot express."""
        wanted = {
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
            "normalization": "RMSNorm",
            "swiglu": True,
        }
        return self.differences(options, wanted | self.own_needs(options))

    def own_needs(self, options: ModelOptions) -> dict[str, Any]:
        """What options have to be for this family rather than another like it."""
        return {
            "add_qkv_bias": options.add_qkv_bias and options.add_bias_linear,
            "qk_layernorm": False,
            "is_windowed": False,
        }

    def config(self, options: ModelOptions) -> dict[str, Any]:
        """The configuration that describes a model, in the spellings of transformers 4 and 5."""
        config = {
            "architectures": [self.architecture],
            "hidden_act": "silu",
            "num_hidden_layers": options.num_layers,
            "hidden_size": options.hidden_size,
            "intermediate_size": options.ffn_hidden_size,
            "num_attention_heads": options.num_attention_heads,
            "num_key_value_heads": options.num_query_groups,
            "head_dim": options.kv_channels,
            "max_position_embeddings": options.max_position_embeddings,
            "rms_norm_eps": options.norm_epsilon,
            "tie_word_embeddings": not options.untie_embeddings_and_output_weights,
            "attention_dropout": options.attention_dropout,
        }
        return config | rotary_config(options) | self.own_config(options)

    def own_config(self, options: ModelOptions) -> dict[str, Any]:
        """What this family's configuration has beyond the others'."""
        return {"attention_bias": options.add_bias_linear, "mlp_bias": options.add_bias_linear}

    def rules(self, options: ModelOptions) -> Iterator[Rule]:
        """How each parameter is stored."""
        yield Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
        for i in range(options.num_layers):
            ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
            for name, source in (
                ("input_layernorm", "input_layernorm"),
                ("pre_mlp_layernorm", "post_attention_layernorm"),
            ):
                yield Rule(f"{ours}.{name}.weight", (f"{theirs}.{source}.weight",))
            if options.qk_layernorm:
                for kind in "qk":
                    yield Rule(
                        f"{ours}.self_attention.{kind}_layernorm.weight",
                        (f"{theirs}.self_attn.{kind}_norm.weight",),
                    )
            for part in ("weight", "bias") if options.has_qkv_bias else ("weight",):
                yield _qkv(ours, theirs, part, options)
            for part in ("weight", "bias") if options.add_bias_linear else ("weight",):
                yield Rule(
                    f"{ours}.self_attention.linear_proj.{part}",
                    (f"{theirs}.self_attn.o_proj.{part}",),
                )
                yield stacked(
                    f"{ours}.mlp.linear_fc1.{part}",
                    f"{theirs}.mlp.gate_proj.{part}",
                    f"{theirs}.mlp.up_proj.{part}",
                )
                yield Rule(f"{ours}.mlp.linear_fc2.{part}", (f"{theirs}.mlp.down_proj.{part}",))
        yield Rule("decoder.final_layernorm.weight", ("model.norm.weight",))
        if options.untie_embeddings_and_output_weights:
            yield Rule("output_layer.weight", ("lm_head.weight",))


class Mistral(Llama):
    """Llama without biases, with a sliding window in every layer."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"

    def own_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The window; a configuration that does not mention it has one of 4096."""
        return window_options(config, config.get("sliding_window", 4096), 0)

    def own_needs(self, options: ModelOptions) -> dict[str, Any]:
        """No biases, no norms of queries; a window in all layers or none."""
        first = options.sliding_window_first_layer if not options.is_windowed else 0
        return {
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": False,
            "sliding_window_first_layer": first,
        }

    def own_config(self, options: ModelOptions) -> dict[str, Any]:
        """The window, null where there is none."""
        return {"sliding_window": options.sliding_window if options.is_windowed else None}


class Qwen2(Llama):
    """Llama with biases of queries, keys and values, and a sliding window in the last layers."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"

    def own_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """QKV bias; the window counts only where it is switched on."""
        return {"add_qkv_bias": True, **_switched_window(config)}

    def own_needs(self, options: ModelOptions) -> dict[str, Any]:  # noqa: ARG002
        """Biases of queries, keys and values only."""
        return {"add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": False}

    def own_config(self, options: ModelOptions) -> dict[str, Any]:
        """The window and its switch."""
        windowed = options.is_windowed
        first = options.sliding_window_first_layer if windowed else options.num_layers
        return {
            "use_sliding_window": windowed,
            "sliding_window": options.sliding_window if windowed else None,
            "max_window_layers": first,
            "layer_types": layer_types(options),
        }


class Qwen3(Qwen2):
    """Qwen2 without biases, with norms of each query and key head."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"

    def own_options(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Norms of queries and keys; heads of 128 where the configuration does not say."""
        require(config, "attention_bias", False)
        window = _switched_window(config)
        return {"qk_layernorm": True, "kv_channels": config.get("head_dim") or 128, **window}

    def own_needs(self, options: ModelOptions) -> dict[str, Any]:  # noqa: ARG002
        """Norms of queries and keys, no biases."""
        return {"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True}

    def own_config(self, options: ModelOptions) -> dict[str, Any]:
        """The window, and that there are no biases."""
        return super().own_config(options) | {"attention_bias": False}


def _switched_window(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("use_sliding_window", False):
        return {}
    first = config.get("max_window_layers", 28)
    return window_options(config, config.get("sliding_window", 4096), first)


def _qkv(ours: str, theirs: str, part: str, options: ModelOptions) -> Rule:
    return Rule(
        f"{ours}.self_attention.linear_qkv.{part}",
        tuple(f"{theirs}.self_attn.{kind}_proj.{part}" for kind in "qkv"),
        lambda parts: group_qkv(parts[0], parts[1], parts[2], options),
        lambda tensor: ungroup_qkv(tensor, options),
    )
