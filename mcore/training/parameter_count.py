"""How many parameters a part of a GPT model has on one tensor-parallel rank, from the options."""

from __future__ import annotations

from dataclasses import dataclass

from mcore.config.run import RunConfig
from mcore.errors import ConfigError
from mcore.models.gpt.embedding import pad_vocab_size


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Parameters of a model chunk, vocabulary padding included.

    Attributes:
        layer: of one layer: weight matrices.
        layer_vectors: of one layer: norms and biases.
        layers: number of layers.
        embedding: word and position embeddings.
        output: output matrix, where it is the chunk's own.
        final_norm: norm after the last layer.
    """

    layer: int
    layer_vectors: int
    layers: int
    embedding: int
    output: int
    final_norm: int

    @property
    def of_layers(self) -> int:
        """Parameters of all layers."""
        return self.layers * (self.layer + self.layer_vectors)

    @property
    def matrices(self) -> int:
        """Weight matrices of all layers: what Muon orthogonalises."""
        return self.layers * self.layer

    @property
    def total(self) -> int:
        """Parameters of the chunk."""
        return self.of_layers + self.embedding + self.output + self.final_norm


def vocabulary_rows(config: RunConfig) -> int:
    """Rows of the word embedding on one tensor-parallel rank.

    Raises:
        ConfigError: the vocabulary's size is not known (the tokenizer tells it).
    """
    size, tp = config.tokenizer.vocab_size, config.model.tensor_model_parallel_size
    if size is None:
        raise ConfigError(
            "the size of the vocabulary is not known: give --vocab-size, or build the tokenizer "
            "and put its vocab_size into the configuration"
        )
    return pad_vocab_size(size, config.tokenizer.make_vocab_size_divisible_by, tp) // tp


def qkv_size(config: RunConfig) -> int:
    """Rows of the QKV projection on one tensor-parallel rank."""
    model, tp = config.model, config.model.tensor_model_parallel_size
    groups = max(1, model.query_groups // tp)
    return (model.num_attention_heads // tp + 2 * groups) * model.head_dim


def fc1_size(config: RunConfig) -> int:
    """Rows of the first matrix of the MLP on one tensor-parallel rank."""
    model = config.model
    blocks = 2 if model.gated_linear_unit else 1
    return blocks * model.ffn_size // model.tensor_model_parallel_size


def count_parameters(
    config: RunConfig, num_layers: int, *, pre_process: bool, post_process: bool
) -> ParameterCount:
    """Count the parameters of a chunk of `num_layers` layers; padding of flat buffers is left out.

    Args:
        config: the model.
        num_layers: layers of the chunk.
        pre_process: it embeds tokens.
        post_process: it computes the loss.
    """
    h = config.model.hidden_size
    of_layer = _layer_parameters(config)
    words = vocabulary_rows(config) * h
    embedding = 0
    if pre_process:
        learned = config.gpt.position_embedding_type == "learned_absolute"
        embedding = words + (h * (config.max_positions or 0) if learned else 0)
    owns_output = config.gpt.untie_embeddings_and_output_weights or not pre_process
    return ParameterCount(
        layer=sum(numel for numel, is_matrix in of_layer if is_matrix),
        layer_vectors=sum(numel for numel, is_matrix in of_layer if not is_matrix),
        layers=num_layers,
        embedding=embedding,
        output=words if post_process and owns_output else 0,
        final_norm=_norm_vectors(config) * h if post_process else 0,
    )


def parameter_sizes(config: RunConfig, count: ParameterCount) -> list[int]:
    """Elements of each parameter of a chunk, in the order in which the model registers them."""
    h = config.model.hidden_size
    words = vocabulary_rows(config) * h
    sizes = [words, count.embedding - words] if count.embedding else []
    sizes += [numel for numel, _ in _layer_parameters(config)] * count.layers
    if count.final_norm:
        sizes += [h] * _norm_vectors(config)
    return [numel for numel in [*sizes, count.output] if numel]


def _layer_parameters(config: RunConfig) -> list[tuple[int, bool]]:
    """Elements of a layer's parameters and whether each is a matrix, as they are registered."""
    model, h, tp = config.model, config.model.hidden_size, config.model.tensor_model_parallel_size
    qkv, fc1, has_bias = qkv_size(config), fc1_size(config), model.add_bias_linear
    norm = [(h, False)] * _norm_vectors(config)
    of_heads = [(model.head_dim, False)] * (2 * _norm_vectors(config) if model.qk_layernorm else 0)
    return [
        *norm,
        *_linear(qkv, h, has_bias or model.add_qkv_bias),
        *_linear(h, model.num_attention_heads * model.head_dim // tp, has_bias),
        *of_heads,
        *norm,
        *_linear(fc1, h, has_bias),
        *_linear(h, model.ffn_size // tp, has_bias),
    ]


def _linear(rows: int, columns: int, has_bias: bool) -> list[tuple[int, bool]]:
    return [(rows * columns, True), *([(rows, False)] if has_bias else [])]


def _norm_vectors(config: RunConfig) -> int:
    """Parameters of a norm: weight, and bias of LayerNorm."""
    return 2 if config.model.normalization == "LayerNorm" else 1
