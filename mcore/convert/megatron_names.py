"""Names of parameters in the checkpoints of Megatron-LM, old and new, and how tensors are cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore.errors import CheckpointError

#: Buffers and remarks that hold nothing to load.
_IGNORED = re.compile(
    r".*(_extra_state|rotary_emb\.inv_freq|rotary_pos_emb\.inv_freq|core_attention\.bias|"
    r"attention\.masked_bias)(/.*)?"
)
_LAYER = re.compile(r"(.*?)layers\.(\d+)\.(.*)")

#: Parts of names of Megatron before its core, and of the names with a fused norm.
_RENAMED = (
    (r"(language_model\.)?embedding\.", "embedding."),
    (r"(language_model\.)?(encoder|transformer)\.final_layernorm\.", "decoder.final_layernorm."),
    (r"(language_model\.)?(encoder|transformer)\.layers\.", "decoder.layers."),
    (r"(language_model\.)?output_layer\.", "output_layer."),
    (r"word_embeddings_for_head\.", "output_layer."),
)
_RENAMED_IN_LAYER = (
    ("attention.", "self_attention."),
    ("self_attention.query_key_value.", "self_attention.linear_qkv."),
    ("self_attention.dense.", "self_attention.linear_proj."),
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("input_norm.", "input_layernorm."),
    ("post_attention_layernorm.", "pre_mlp_layernorm."),
    ("post_attention_norm.", "pre_mlp_layernorm."),
    ("mlp.dense_h_to_4h.", "mlp.linear_fc1."),
    ("mlp.dense_4h_to_h.", "mlp.linear_fc2."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.q_norm.", "self_attention.q_layernorm."),
    ("self_attention.k_norm.", "self_attention.k_layernorm."),
)


def flat_tensors(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors of a state dict and of the dicts in it, by their dotted names."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_tensors(value, f"{name}.")
        elif isinstance(value, Tensor) and not is_ignored(name):
            yield name, value


def is_ignored(name: str) -> bool:
    """Whether a name is that of a buffer that holds nothing to load."""
    return _IGNORED.fullmatch(name) is not None


def canonical_name(name: str) -> str:
    """Our name of a parameter; the layer's number stays as it is."""
    name = name.removeprefix("module.")
    for pattern, new in _RENAMED:
        name, count = re.subn(f"^{pattern}", new, name)
        if count:
            break
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    before, layer, rest = match.groups()
    for old, new in _RENAMED_IN_LAYER:
        if rest.startswith(old):
            rest = new + rest.removeprefix(old)
    return f"{before}layers.{layer}.{rest}"


def fused_name(name: str) -> str:
    """The name with transformer-engine's fused norms."""
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def renumbered(name: str, offset: int) -> str:
    """The name with `offset` added to its layer number."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    before, layer, rest = match.groups()
    return f"{before}layers.{int(layer) + offset}.{rest}"


def layer_of(name: str) -> int | None:
    """The layer that a parameter belongs to."""
    match = _LAYER.fullmatch(name)
    return None if match is None else int(match.group(2))


def cut_dim(name: str) -> int | None:
    """The dimension along which tensor-parallel ranks cut a parameter; None = each has it whole."""
    if re.search(r"(linear_qkv|linear_fc1)\.(weight|bias)$", name):
        return 0
    if re.search(r"(linear_proj|linear_fc2)\.weight$", name):
        return 1
    return 0 if re.search(r"(word_embeddings|^output_layer)\.weight$", name) else None


def is_gated(name: str, swiglu: bool) -> bool:
    """Whether each rank's part is its gate rows above its up rows."""
    return swiglu and ".linear_fc1." in name


def merged(name: str, parts: Sequence[Tensor], swiglu: bool) -> Tensor:
    """The whole parameter of its tensor-parallel parts; of `meta` tensors its outline.

    Raises:
        CheckpointError: ranks disagree about a parameter that each holds whole.
    """
    dim = cut_dim(name)
    if dim is None:
        if any(not _same(part, parts[0]) for part in parts[1:]):
            raise CheckpointError(f"tensor-parallel ranks hold different copies of {name}")
        return parts[0]
    if is_gated(name, swiglu):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(parts), dim) if len(parts) > 1 else parts[0]


def _same(part: Tensor, other: Tensor) -> bool:
    return part.shape == other.shape and (part.is_meta or torch.equal(part, other))


def shared_out(name: str, tensor: Tensor, ranks: int, swiglu: bool) -> list[Tensor]:
    """The tensor-parallel parts of a whole parameter; the inverse of `merged`.

    Raises:
        CheckpointError: it cannot be cut into so many.
    """
    dim = cut_dim(name)
    if dim is None:
        return [tensor] * ranks
    blocks = tensor.chunk(2) if is_gated(name, swiglu) else (tensor,)
    if blocks[0].shape[dim] % ranks:
        raise CheckpointError(
            f"{name} of {list(tensor.shape)} cannot be cut for tensor-parallel size {ranks}"
        )
    cuts = [block.chunk(ranks, dim) for block in blocks]
    return [torch.cat(parts, dim) for parts in zip(*cuts, strict=True)]


def modern_qkv(tensor: Tensor, version: float, heads: int) -> Tensor:
    """One rank's QKV rows in the order of checkpoint version 2 and later: [heads, 3, d].

    Version 0 had [3, heads, d], version 1.0 had [heads, d, 3].
    """
    if version >= 2.0:
        return tensor
    size, rest = tensor.shape[0] // (3 * heads), tensor.shape[1:]
    if version == 0:
        return tensor.view(3, heads, size, *rest).transpose(0, 1).reshape(tensor.shape)
    return tensor.view(heads, size, 3, *rest).transpose(1, 2).reshape(tensor.shape)
