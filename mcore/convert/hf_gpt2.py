"""The Hugging Face family `gpt2` (GPT2LMHeadModel)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mcore.convert.hf_family import HfFamily, require
from mcore.convert.model_options import ModelOptions
from mcore.convert.rules import Rule, group_qkv, transposed, ungroup_qkv
from mcore.errors import UnsupportedError

_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
_EXACT_GELU = ("gelu", "gelu_python")


class Gpt2(HfFamily):
    """Learned positions, LayerNorm, GELU, biases everywhere, matrices stored [in, out]."""

    model_type = "gpt2"
    prefix = "transformer."
    buffers = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")

    def options(self, config: Mapping[str, Any]) -> ModelOptions:
        """The options that compute what a configuration describes."""
        require(config, "scale_attn_weights", True)
        require(config, "scale_attn_by_inverse_layer_idx", False)
        require(config, "add_cross_attention", False)
        activation = config.get("activation_function", "gelu_new")
        if activation not in _TANH_GELU + _EXACT_GELU:
            raise UnsupportedError(
                f"activation_function is {activation!r}; gpt2 models with "
                f"{', '.join(_EXACT_GELU + _TANH_GELU)} can be converted"
            )
        residual, embedding = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
        if residual != embedding:
            raise UnsupportedError(
                f"resid_pdrop ({residual}) and embd_pdrop ({embedding}) differ, and mcore has one "
                "hidden_dropout for both; make them equal in config.json"
            )
        hidden, heads = config["n_embd"], config["n_head"]
        return ModelOptions(
            num_layers=config["n_layer"],
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=heads,
            kv_channels=hidden // heads,
            ffn_hidden_size=config.get("n_inner") or 4 * hidden,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["n_positions"],
            norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
            openai_gelu=activation in _TANH_GELU,
            untie_embeddings_and_output_weights=not config.get("tie_word_embeddings", True),
            hidden_dropout=residual,
            attention_dropout=config.get("attn_pdrop", 0.1),
        )

    def misfits(self, options: ModelOptions) -> list[str]:
        """Options of a model that this family cannot express."""
        head = options.hidden_size // options.num_attention_heads
        wanted = {
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "swiglu": False,
            "add_bias_linear": True,
            "qk_layernorm": False,
            "is_windowed": False,
            "num_query_groups": options.num_attention_heads,
            "kv_channels": head,
        }
        return self.differences(options, wanted)

    def config(self, options: ModelOptions) -> dict[str, Any]:
        """The configuration that describes a model."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new" if options.openai_gelu else "gelu",
            "n_layer": options.num_layers,
            "n_embd": options.hidden_size,
            "n_head": options.num_attention_heads,
            "n_inner": options.ffn_hidden_size,
            "n_positions": options.max_position_embeddings,
            "n_ctx": options.max_position_embeddings,
            "layer_norm_epsilon": options.norm_epsilon,
            "tie_word_embeddings": not options.untie_embeddings_and_output_weights,
            "resid_pdrop": options.hidden_dropout,
            "embd_pdrop": options.hidden_dropout,
            "attn_pdrop": options.attention_dropout,
        }

    def rules(self, options: ModelOptions) -> Iterator[Rule]:
        """How each parameter is stored."""
        yield Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",))
        yield Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
        for i in range(options.num_layers):
            ours, theirs = f"decoder.layers.{i}", f"transformer.h.{i}"
            yield _qkv(ours, theirs, options)
            for name, source in (
                ("self_attention.linear_proj", "attn.c_proj"),
                ("mlp.linear_fc1", "mlp.c_fc"),
                ("mlp.linear_fc2", "mlp.c_proj"),
            ):
                yield transposed(f"{ours}.{name}.weight", f"{theirs}.{source}.weight")
                yield Rule(f"{ours}.{name}.bias", (f"{theirs}.{source}.bias",))
            yield from _norm(f"{ours}.input_layernorm", f"{theirs}.ln_1")
            yield from _norm(f"{ours}.pre_mlp_layernorm", f"{theirs}.ln_2")
            yield _qkv_bias(ours, theirs, options)
        yield from _norm("decoder.final_layernorm", "transformer.ln_f")
        if options.untie_embeddings_and_output_weights:
            yield Rule("output_layer.weight", ("lm_head.weight",))


def _norm(name: str, source: str) -> Iterator[Rule]:
    for part in ("weight", "bias"):
        yield Rule(f"{name}.{part}", (f"{source}.{part}",))


def _qkv(ours: str, theirs: str, options: ModelOptions) -> Rule:
    def join(parts: list[Tensor]) -> Tensor:
        query, key, value = parts[0].T.chunk(3)  # [h, 3h] -> 3 x [h, h]
        return group_qkv(query, key, value, options)

    return Rule(
        f"{ours}.self_attention.linear_qkv.weight",
        (f"{theirs}.attn.c_attn.weight",),
        join,
        lambda tensor: [torch.cat(ungroup_qkv(tensor, options)).T],
    )


def _qkv_bias(ours: str, theirs: str, options: ModelOptions) -> Rule:
    def join(parts: list[Tensor]) -> Tensor:
        query, key, value = parts[0].chunk(3)
        return group_qkv(query, key, value, options)

    return Rule(
        f"{ours}.self_attention.linear_qkv.bias",
        (f"{theirs}.attn.c_attn.bias",),
        join,
        lambda tensor: [torch.cat(ungroup_qkv(tensor, options))],
    )
