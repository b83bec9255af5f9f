"""Shape and numerics of a transformer decoder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from mcore.config.fields import below, flag, not_one_of, refuse
from mcore.config.megatron_names import accepts_megatron_names
from mcore.config.parallel import ModelParallelConfig

Normalization = Literal["LayerNorm", "RMSNorm"]

#: Parts of a layer that can be recomputed by themselves.
RECOMPUTE_MODULES = ("core_attn", "mlp", "layernorm")


@accepts_megatron_names
@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(ModelParallelConfig):
    """Options of the transformer layers, with Megatron's names.

    It extends `ModelParallelConfig` because every layer of the block needs both, and because code
    written for Megatron builds one object from both sets of names.

    Raises:
        ConfigError: sizes that do not divide, or options that exclude each other.
    """

    num_layers: int = flag(required=True, model=True, help="Number of transformer layers.")
    hidden_size: int = flag(required=True, model=True, help="Width of the residual stream.")
    num_attention_heads: int = flag(required=True, model=True, help="Number of query heads.")
    num_query_groups: int | None = flag(
        None,
        model=True,
        help="Number of key/value heads (grouped-query attention); needs --group-query-attention.",
    )
    kv_channels: int | None = flag(
        None, model=True, help="Size of one head; hidden size / heads when absent."
    )
    ffn_hidden_size: int | None = flag(
        None,
        model=True,
        help="Width of the MLP; 4 x hidden size when absent, 8/3 of it down to a multiple of 64 "
        "with --swiglu.",
    )
    normalization: Normalization = flag("LayerNorm", model=True, help="Kind of norm.")
    layernorm_epsilon: float = flag(
        1e-5,
        model=True,
        name="--norm-epsilon",
        aliases=("--layernorm-epsilon",),
        help="Added to the variance in norms.",
    )
    gated_linear_unit: bool = flag(
        False, model=True, name="--swiglu", help="SwiGLU MLP: silu(gate) x up instead of GELU."
    )
    openai_gelu: bool = flag(
        False, model=True, help="The tanh form of GELU (Hugging Face's gelu_new) instead of erf."
    )
    add_bias_linear: bool = flag(
        True, model=True, name="--bias-linear", help="Biases in linear layers."
    )
    add_qkv_bias: bool = flag(
        False, model=True, help="A bias in the QKV projection even where linear layers have none."
    )
    qk_layernorm: bool = flag(
        False, model=True, help="Normalise each query and key head before attention."
    )
    sliding_window: int | None = flag(
        None,
        model=True,
        help="A token attends to this many tokens, the last of them itself; to all before it when "
        "absent.",
    )
    sliding_window_first_layer: int = flag(
        0, model=True, help="First layer with the sliding window, from 0; those before see all."
    )
    rotary_interleaved: bool = flag(
        False, model=True, help="Rotate neighbouring pairs of channels rather than the two halves."
    )
    hidden_dropout: float = flag(
        0.1, model=True, help="Probability that a residual or embedding element is dropped."
    )
    attention_dropout: float = flag(
        0.1, model=True, help="Probability that an attention weight is dropped."
    )
    init_method_std: float = flag(
        0.02,
        help="Standard deviation of initial weights; divided by sqrt(2 x layers) where a layer "
        "writes to the residual stream.",
    )
    label_smoothing: float = flag(
        0.0, help="Share of each target that is spread evenly over the vocabulary, in training."
    )
    z_loss_coefficient: float = flag(
        0.0,
        help="Weight of the squared log of the softmax's denominator in the loss, in training; "
        "keeps logits from drifting. The logged loss includes it.",
    )
    cross_entropy_loss_fusion: bool = flag(
        False,
        help="Compute output layer and loss together, a chunk of tokens at a time, so that logits "
        "never exist for all of them. Off = in float16, and where they would take over 256 MB.",
    )
    fp32_residual_connection: bool = flag(
        False, help="Keep the residual stream between layers in float32 in a low-precision model."
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        help="Recompute activations in backward rather than keep them: of whole layers, or of "
        "--recompute-modules.",
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None,
        help="With full recomputation: uniform = groups of --recompute-num-layers layers keep "
        "their first input; block = the first --recompute-num-layers layers of a stage.",
    )
    recompute_num_layers: int | None = flag(
        None, help="Layers in each recomputed group (uniform) or recomputed at all (block)."
    )
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",),
        metavar="NAME",
        help="With selective recomputation, what is recomputed: core_attn, mlp, layernorm.",
    )
    distribute_saved_activations: bool = flag(
        False,
        help="Keep 1/t of each recomputed group's input on each tensor-parallel rank; with full "
        "recomputation, without --sequence-parallel (which does so anyway).",
    )
    cpu_offloading_num_layers: int = flag(
        0, help="Layers of a stage, from the first, whose activations wait in host memory (CUDA)."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        sizes = list(ModelParallelConfig._problems(self))
        sizes += below(
            self,
            1,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "sliding_window",
        )
        yield from sizes
        yield from below(self, 0, "sliding_window_first_layer", "cpu_offloading_num_layers")
        yield from below(self, 0.0, "layernorm_epsilon", "init_method_std")
        yield from not_one_of(self.normalization, ("LayerNorm", "RMSNorm"), "normalization")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield f"{name} is {getattr(self, name)}; use a probability below 1"
        if not 0.0 <= self.label_smoothing < 1.0:
            yield f"label_smoothing is {self.label_smoothing}; it must lie in [0, 1)"
        if self.z_loss_coefficient < 0.0:
            yield f"z_loss_coefficient is {self.z_loss_coefficient}; it must not be negative"
        if self.gated_linear_unit and self.openai_gelu:
            yield "gated_linear_unit and openai_gelu exclude each other; drop one"
        yield from self._wrong_recompute()
        if not sizes:
            yield from self._wrong_heads()

    def _wrong_heads(self) -> Iterator[str]:
        heads, groups = self.num_attention_heads, self.query_groups
        tp = self.tensor_model_parallel_size
        if self.kv_channels is None and self.hidden_size % heads:
            yield (
                f"hidden_size ({self.hidden_size}) must be divisible by num_attention_heads "
                f"({heads}), or give kv_channels"
            )
        if heads % groups:
            yield (
                f"num_attention_heads ({heads}) must be divisible by num_query_groups ({groups}); "
                f"use {_divisors(heads)} groups"
            )
        if heads % tp:
            yield (
                f"num_attention_heads ({heads}) must be divisible by tensor_model_parallel_size "
                f"({tp}); use {_divisors(heads)}"
            )
        if self.num_query_groups is not None and groups % tp and tp % groups:
            yield (
                f"num_query_groups ({groups}) must be a multiple or a divisor of "
                f"tensor_model_parallel_size ({tp})"
            )
        if self.ffn_size == 0:
            yield (
                f"hidden_size ({self.hidden_size}) gives a gated MLP no width, since it is a "
                "multiple of 64 near 8/3 of it; give ffn_hidden_size"
            )
        elif self.ffn_size % tp:
            yield (
                f"ffn_hidden_size ({self.ffn_size}) must be divisible by "
                f"tensor_model_parallel_size ({tp}); the nearest are "
                f"{self.ffn_size // tp * tp} and {(self.ffn_size // tp + 1) * tp}"
            )

    def _wrong_recompute(self) -> Iterator[str]:
        granularity = self.recompute_granularity
        if granularity == "full":
            if self.recompute_method is None or not self.recompute_num_layers:
                yield (
                    "recompute_granularity full needs recompute_method uniform or block, and "
                    "recompute_num_layers of at least 1"
                )
        elif self.recompute_method is not None or self.recompute_num_layers is not None:
            yield "recompute_method and recompute_num_layers need recompute_granularity full"
        unknown = sorted(set(self.recompute_modules) - set(RECOMPUTE_MODULES))
        if unknown:
            yield (
                f"recompute_modules has {', '.join(unknown)}; use {', '.join(RECOMPUTE_MODULES)}"
            )
        if self.distribute_saved_activations:
            if granularity != "full" or self.sequence_parallel:
                yield (
                    "distribute_saved_activations needs recompute_granularity full and no "
                    "sequence_parallel, which keeps 1/t of the activations by itself"
                )
            if self.hidden_size % self.tensor_model_parallel_size:
                yield (
                    f"distribute_saved_activations needs hidden_size ({self.hidden_size}) to be "
                    f"divisible by tensor_model_parallel_size ({self.tensor_model_parallel_size})"
                )
        if self.cpu_offloading_num_layers and granularity == "full":
            yield "cpu_offloading_num_layers excludes full recomputation; drop one"
        if self.cpu_offloading_num_layers and self.recomputes("layernorm"):
            yield (
                "cpu_offloading_num_layers excludes layernorm from recompute_modules, whose way of "
                "keeping less would leave nothing to offload; drop one"
            )

    def recomputes(self, module: str) -> bool:
        """Whether a part of the layer is recomputed by itself: core_attn, mlp or layernorm."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules

    @property
    def pipeline_dtype(self) -> torch.dtype:
        """Data type of the residual stream, which travels between stages."""
        if self.fp32_residual_connection:
            return torch.promote_types(self.params_dtype, torch.float32)
        return self.params_dtype

    @property
    def query_groups(self) -> int:
        """Number of key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Width of the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated_linear_unit:
            return int(self.hidden_size * 8 / 3 / 64) * 64
        return 4 * self.hidden_size

    @property
    def output_init_std(self) -> float:
        """Standard deviation of weights that write to the residual stream (GPT-2's rule)."""
        return self.init_method_std / math.sqrt(2.0 * self.num_layers)


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
