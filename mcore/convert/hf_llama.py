"""The Hugging Face family `llama` (LlamaForCausalLM)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mcore.convert.hf_family import HfFamily, require
from mcore.convert.model_options import ModelOptions
from mcore.convert.rules import Rule, group_qkv, stacked, ungroup_qkv
from mcore.errors import UnsupportedError


class Llama(HfFamily):
    """Rotary positions, RMSNorm, SwiGLU, grouped queries; biases everywhere or nowhere."""

    model_type = "llama"
    prefix = "model."
    buffers = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

    def options(self, config: Mapping[str, Any]) -> ModelOptions:
        """The options that compute what a configuration describes."""
        require(config, "sliding_window", None)
        require(config, "partial_rotary_factor", 1.0)
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedError(
                f"hidden_act is {activation!r}; llama models with silu can be converted"
            )
        biases = (config.get("attention_bias", False), config.get("mlp_bias", False))
        if biases[0] != biases[1]:
            raise UnsupportedError(
                f"attention_bias ({biases[0]}) and mlp_bias ({biases[1]}) differ, and mcore has "
                "one option (add_bias_linear) for both"
            )
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return ModelOptions(
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            kv_channels=config.get("head_dim") or hidden // heads,
            ffn_hidden_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            position_embedding_type="rope",
            rotary_base=float(_rope_theta(config)),
            normalization="RMSNorm",
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            swiglu=True,
            add_bias_linear=biases[0],
            untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", False),
            hidden_dropout=0.0,
            attention_dropout=config.get("attention_dropout") or 0.0,
        )

    def misfits(self, options: ModelOptions) -> list[str]:
        """Options of a model that this family cannot express."""
        wanted = {
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
            "normalization": "RMSNorm",
            "swiglu": True,
            "add_qkv_bias": options.add_qkv_bias and options.add_bias_linear,
            "qk_layernorm": False,
        }
        return self.differences(options, wanted)

    def config(self, options: ModelOptions) -> dict[str, Any]:
        """The configuration that describes a model, in the spellings of transformers 4 and 5."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "num_hidden_layers": options.num_layers,
            "hidden_size": options.hidden_size,
            "intermediate_size": options.ffn_hidden_size,
            "num_attention_heads": options.num_attention_heads,
            "num_key_value_heads": options.num_query_groups,
            "head_dim": options.kv_channels,
            "max_position_embeddings": options.max_position_embeddings,
            "rms_norm_eps": options.norm_epsilon,
            "rope_theta": options.rotary_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": options.rotary_base},
            "attention_bias": options.add_bias_linear,
            "mlp_bias": options.add_bias_linear,
            "tie_word_embeddings": not options.untie_embeddings_and_output_weights,
            "attention_dropout": options.attention_dropout,
        }

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
            for part in ("weight", "bias") if options.add_bias_linear else ("weight",):
                yield _qkv(ours, theirs, part, options)
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


def _qkv(ours: str, theirs: str, part: str, options: ModelOptions) -> Rule:
    return Rule(
        f"{ours}.self_attention.linear_qkv.{part}",
        tuple(f"{theirs}.self_attn.{kind}_proj.{part}" for kind in "qkv"),
        lambda parts: group_qkv(parts[0], parts[1], parts[2], options),
        lambda tensor: ungroup_qkv(tensor, options),
    )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies; any scaling of them is refused by name."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedError(
                f"{name} has rope_type {kind!r}; models without rotary scaling can be converted"
            )
        if "rope_theta" in rope:
            require(rope, "partial_rotary_factor", 1.0)
            return float(rope["rope_theta"])
    return float(config.get("rope_theta", 10000.0))
