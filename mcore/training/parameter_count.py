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
    model, h = config.model, config.model.hidden_size
    tp = model.tensor_model_parallel_size
    attended = model.num_attention_heads * model.head_dim // tp
    ffn = model.ffn_size // tp
    matrices = h * (qkv_size(config) + attended + fc1_size(config) + ffn)
    norm = 2 if model.normalization == "LayerNorm" else 1  # weight and bias
    vectors = 2 * norm * h + (2 * norm * model.head_dim if model.qk_layernorm else 0)
    if model.add_bias_linear or model.add_qkv_bias:
        vectors += qkv_size(config)
    if model.add_bias_linear:
        vectors += fc1_size(config) + 2 * h
    words = vocabulary_rows(config) * h
    embedding = 0
    if pre_process:
        learned = config.gpt.position_embedding_type == "learned_absolute"
        embedding = words + (h * (config.max_positions or 0) if learned else 0)
    owns_output = config.gpt.untie_embeddings_and_output_weights or not pre_process
    return ParameterCount(
        layer=matrices,
        layer_vectors=vectors,
        layers=num_layers,
        embedding=embedding,
        output=words if post_process and owns_output else 0,
        final_norm=norm * h if post_process else 0,
    )
