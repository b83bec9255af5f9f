"""Bytes of the tensors that a microbatch's forward leaves for its backward, from the options.

The terms are those of Korthikanti et al. 2022 (arXiv:2205.05198), section 4, for the operations as
they are written here: attention keeps no matrix of sequence x sequence unless weights are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore.config.run import RunConfig
from mcore.config.transformer import TransformerConfig
from mcore.models.gpt.output import FUSED_CHUNK, fuses_loss
from mcore.tensor_parallel.cross_entropy import CHUNK_ELEMENTS
from mcore.training.parameter_count import fc1_size, qkv_size, vocabulary_rows


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of one layer and microbatch.

    Attributes:
        kept: from forward to backward, with the recomputation that was asked for.
        recomputed: made again in the layer's backward.
        gradients: the largest gradients that exist at once while the backward goes through it.
        boundary: its input, all that full recomputation keeps.
    """

    kept: int
    recomputed: int
    gradients: int
    boundary: int


@dataclass(frozen=True, slots=True)
class HeadActivations:
    """Bytes of the final norm, the output layer and the loss, for one microbatch.

    Attributes:
        kept: from forward to backward.
        gradients: what exists beside it in the head's own backward.
    """

    kept: int
    gradients: int


def layer_activations(config: RunConfig, tokens: int, seq_length: int) -> LayerActivations:
    """What a layer keeps on one tensor-parallel rank.

    Args:
        config: the model; micro batches of `tokens / seq_length` samples.
        tokens: tokens of a microbatch.
        seq_length: tokens of a sample.
    """
    model = config.model
    size = model.params_dtype.itemsize
    own = _own_tokens(model, tokens)
    boundary = own * model.hidden_size * model.pipeline_dtype.itemsize
    mlp = tokens * size * _mlp_width(config)
    normed = own * model.hidden_size * size
    core = _attention_core(config, tokens, seq_length)
    masks = 2 * own * model.hidden_size if model.hidden_dropout else 0
    kept = 2 * (_norm_kept(model, own) + normed) + _qkv_kept(config, tokens) + core + mlp + masks
    again = 0
    if model.recomputes("core_attn"):
        again = max(again, core)
        kept -= core
    if model.recomputes("mlp"):
        again = max(again, mlp)
        kept -= mlp
    if model.recomputes("layernorm"):
        again += normed
        kept -= 2 * normed
    widest = max(fc1_size(config), qkv_size(config))
    gradients = tokens * size * (widest + 2 * model.hidden_size)
    return LayerActivations(kept, again, gradients, boundary)


def block_activations(
    config: RunConfig, layer: LayerActivations, num_layers: int
) -> tuple[int, list[tuple[int, int]]]:
    """What a chunk's layers keep of a microbatch, and the largest moments of their backward.

    Returns:
        Bytes kept on the device, and pairs (bytes kept still, bytes beside them): in the backward
        of the last layer, and where the first recomputed layers are run again or offloaded ones
        come back.
    """
    model = config.model
    if num_layers == 0:
        return 0, []
    boundary = layer.boundary
    if model.distribute_saved_activations:
        boundary //= model.tensor_model_parallel_size
    step = min(model.recompute_num_layers or 0, num_layers)
    if model.recompute_method == "uniform":
        kept = -(-num_layers // step) * boundary
        return kept, [(kept, step * layer.kept + layer.gradients)]
    if model.recompute_method == "block":
        first = step * boundary
        kept = first + (num_layers - step) * layer.kept
        moments = [(first, layer.kept + layer.gradients)]
        if step < num_layers:
            moments.append((kept, layer.gradients))
        return kept, moments
    beside = layer.recomputed + layer.gradients
    offloaded = 0
    if config.runtime.device != "cpu":
        offloaded = min(model.cpu_offloading_num_layers, num_layers)
    kept = (num_layers - offloaded) * layer.kept
    moments = [(kept, beside)]
    if offloaded:  # it comes back for its own backward, when all later layers' are gone
        moments.append((0, layer.kept + beside))
    return kept, moments


def head_activations(
    config: RunConfig, tokens: int, *, accumulates: bool, rounds: bool
) -> HeadActivations:
    """What the output head keeps and needs on one tensor-parallel rank.

    Args:
        config: the model.
        tokens: tokens of a microbatch.
        accumulates: the output matrix's gradient is added to the accumulated one where it is made.
        rounds: that is wider, so that the product exists by itself for a moment, and once more as
            wide as that, as on the CPU.
    """
    model, rows = config.model, vocabulary_rows(config)
    size, h = model.params_dtype.itemsize, model.hidden_size
    own = _own_tokens(model, tokens)
    kept = _norm_kept(model, own) + own * h * size
    logits = tokens * rows
    in_place = accumulates and not rounds
    if fuses_loss(model, logits):
        chunk = min(logits, FUSED_CHUNK)
        kept += (tokens - own) * h * size  # gathered along the sequence, and kept so
        summed = 0 if accumulates else rows * h * 4  # over chunks, in float32
        product = 0 if in_place or size == 4 else rows * h * (size + 4)
        # A chunk's gradient is rounded, and then multiplied when its wide form is gone.
        rounding = chunk * 4 + (chunk * size if size < 4 else 0)
        gradients = max(rounding, chunk * size + product)
        return HeadActivations(kept, gradients + tokens * h * size + summed)
    gradients = logits * size + min(logits, CHUNK_ELEMENTS) * 4
    product = tokens * h * size
    if not in_place:
        product += rows * h * (size + (4 if accumulates else 0))
    return HeadActivations(kept + logits * size, max(gradients, logits * size + product))


def _own_tokens(model: TransformerConfig, tokens: int) -> int:
    """Tokens of the residual stream that a rank holds."""
    tp = model.tensor_model_parallel_size
    return tokens // tp if model.sequence_parallel else tokens


def _norm_kept(model: TransformerConfig, tokens: int) -> int:
    """A norm's input and statistics; torch's RMSNorm on the CPU also keeps the scaled input."""
    h, residual = model.hidden_size, model.pipeline_dtype.itemsize
    if model.normalization == "LayerNorm":
        return tokens * (h * residual + 8)
    kept = h * max(residual, 4)  # a low-precision input is widened first, and that is kept
    return tokens * (kept + h * 4 + 4)


def _qkv_kept(config: RunConfig, tokens: int) -> int:
    """The projection, what was made of its parts, and what attention returned."""
    model, tp = config.model, config.model.tensor_model_parallel_size
    heads = model.num_attention_heads // tp
    groups = max(1, model.query_groups // tp)
    normed, rotary = model.qk_layernorm, config.gpt.position_embedding_type == "rope"
    copies = 0
    if heads > groups > 1 and (normed or not rotary):  # no view of the projection
        copies += heads
    if normed or rotary:
        copies += heads + groups
    width = qkv_size(config) + (copies + heads) * model.head_dim
    statistics = 0
    if normed:
        statistics = (heads + groups) * 8
        if model.normalization == "RMSNorm":
            statistics += (heads + groups) * model.head_dim * 4
    return tokens * (width * model.params_dtype.itemsize + statistics)


def _attention_core(config: RunConfig, tokens: int, seq_length: int) -> int:
    """What the softmax keeps: a number a row, or with dropout the weights twice and their mask."""
    model = config.model
    heads = model.num_attention_heads // model.tensor_model_parallel_size
    if not model.attention_dropout:
        return tokens * heads * 4
    size = model.params_dtype.itemsize
    scaled_query = tokens * heads * model.head_dim * size
    return tokens * heads * seq_length * (4 + 1 + size) + scaled_query + seq_length**2


def _mlp_width(config: RunConfig) -> int:
    """Channels that the MLP keeps: before and after the activation; gated also silu(gate)."""
    ffn = config.model.ffn_size // config.model.tensor_model_parallel_size
    return fc1_size(config) + (2 * ffn if config.model.gated_linear_unit else ffn)
