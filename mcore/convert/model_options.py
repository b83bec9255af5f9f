"""The options that define a GPT model, as checkpoints carry them, and the shapes that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from mcore.convert.model_state import outline_of
from mcore.errors import CheckpointError, UnsupportedError

# Stored beside the others and without influence on what the model computes.
_IRRELEVANT = (
    "seq_length",
    "init_method_std",
    "params_dtype",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "vocab_extra_ids",
    "null_tokenizer_eod_id",
    "null_tokenizer_pad_id",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What `common["model"]` of a checkpoint says, under Megatron's names.

    `kv_channels`, `ffn_hidden_size` and `max_position_embeddings` may be absent in a checkpoint;
    here they always have their value. `num_query_groups` is the number of heads without grouping.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_seq_len_interpolation_factor: float | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_max_positions: int = 8192
    sliding_window: int | None = None
    sliding_window_first_layer: int = 0
    normalization: str = "LayerNorm"
    norm_epsilon: float = 1e-5
    swiglu: bool = False
    openai_gelu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> ModelOptions:
        """Read the options of a checkpoint.

        Raises:
            CheckpointError: one that has no default is absent.
            UnsupportedError: one that is not known here, and set.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        for name, value in options.items():
            known = name in names or name in _IRRELEVANT or name == "group_query_attention"
            if not known and value not in (None, False, 0):
                raise UnsupportedError(
                    f"the model has {name} = {value!r}, which the conversion does not know"
                )
        values = {k: v for k, v in options.items() if k in names and v is not None}
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if name not in values:
                raise CheckpointError(f"the checkpoint does not say the model's {name}")
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        if not options.get("group_query_attention", "num_query_groups" in values):
            values["num_query_groups"] = heads
        values.setdefault("num_query_groups", heads)
        values.setdefault("kv_channels", hidden // heads)
        gated = values.get("swiglu", False)
        values.setdefault("ffn_hidden_size", int(hidden * 8 / 3 / 64) * 64 if gated else 4 * hidden)
        if "max_position_embeddings" not in values:
            if not options.get("seq_length"):
                raise CheckpointError("the checkpoint does not say max_position_embeddings")
            values["max_position_embeddings"] = options["seq_length"]
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """The options as a checkpoint stores them."""
        grouped = self.num_query_groups != self.num_attention_heads
        options = dataclasses.asdict(self)
        options["group_query_attention"] = grouped
        if not grouped:
            options["num_query_groups"] = None
        return options

    @property
    def is_windowed(self) -> bool:
        """Whether any layer has a sliding window."""
        return self.sliding_window is not None and self.sliding_window_first_layer < self.num_layers

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the QKV projection has a bias."""
        return self.add_bias_linear or self.add_qkv_bias

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every parameter by name; vocabulary not padded, tied output absent."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "embedding.word_embeddings.weight": (self.vocab_size, hidden)
        }
        if self.position_embedding_type == "learned_absolute":
            shapes["embedding.position_embeddings.weight"] = (self.max_position_embeddings, hidden)
        for layer in range(self.num_layers):
            for name, shape in self._layer_shapes():
                shapes[f"decoder.layers.{layer}.{name}"] = shape
        shapes |= dict(self._norm_shapes("decoder.final_layernorm", hidden))
        if self.untie_embeddings_and_output_weights:
            shapes["output_layer.weight"] = (self.vocab_size, hidden)
        return shapes

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, head = self.hidden_size, self.kv_channels
        qkv = (self.num_attention_heads + 2 * self.num_query_groups) * head
        fc1 = self.ffn_hidden_size * (2 if self.swiglu else 1)
        yield from self._norm_shapes("input_layernorm", hidden)
        yield "self_attention.linear_qkv.weight", (qkv, hidden)
        if self.has_qkv_bias:
            yield "self_attention.linear_qkv.bias", (qkv,)
        if self.qk_layernorm:
            yield from self._norm_shapes("self_attention.q_layernorm", head)
            yield from self._norm_shapes("self_attention.k_layernorm", head)
        yield "self_attention.linear_proj.weight", (hidden, self.num_attention_heads * head)
        yield from self._norm_shapes("pre_mlp_layernorm", hidden)
        yield "mlp.linear_fc1.weight", (fc1, hidden)
        yield "mlp.linear_fc2.weight", (hidden, self.ffn_hidden_size)
        if self.add_bias_linear:
            yield "self_attention.linear_proj.bias", (hidden,)
            yield "mlp.linear_fc1.bias", (fc1,)
            yield "mlp.linear_fc2.bias", (hidden,)

    def _norm_shapes(self, name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (size,)
        if self.normalization == "LayerNorm":
            yield f"{name}.bias", (size,)


def check_shapes(options: ModelOptions, tensors: Mapping[str, Tensor]) -> None:
    """See to it that parameters are those of a model.

    Raises:
        CheckpointError: some are absent, unknown or of another shape.
    """
    shapes = options.shapes()
    found = {name: tuple(outline_of(tensors, name).shape) for name in tensors}
    absent, unknown = shapes.keys() - found.keys(), found.keys() - shapes.keys()
    if absent or unknown:
        raise CheckpointError(
            f"the parameters are not those of the model: absent {sorted(absent)}, "
            f"unknown {sorted(unknown)}"
        )
    wrong = [
        f"{name} has {list(found[name])}, the options say {list(shape)}"
        for name, shape in shapes.items()
        if found[name] != shape
    ]
    if wrong:
        raise CheckpointError(f"shapes contradict the options: {'; '.join(wrong)}")
