"""Models that DeepSpeed trained: those of Megatron-DeepSpeed, and Hugging Face's."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.convert.deepspeed_weights import ModelRank, Weight, read_ranks
from mcore.convert.hf_files import read_json
from mcore.convert.huggingface import state_of
from mcore.convert.megatron_args import options_from_args
from mcore.convert.megatron_names import canonical_name, is_ignored, merged
from mcore.convert.model_options import ModelOptions, check_shapes
from mcore.convert.model_state import ModelTensors
from mcore.errors import CheckpointError, UnsupportedError

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
#: Modules of the pipeline engine: numbered, or tied between stages under a name.
_PIPELINE = re.compile(r"(?:(\d+)|tied_modules\.[^.]+)\.(.+)")
_IN_LAYER = re.compile(r"(self_)?attention\.|mlp\.|input_|post_attention_")


def read_megatron_deepspeed(
    path: str | os.PathLike[str], vocab_size: int | None = None
) -> tuple[ModelOptions, ModelTensors]:
    """The model in a folder that Megatron-DeepSpeed wrote, of ZeRO stage 0 to 3.

    Tensor-parallel ranks are merged; with the pipeline engine (its stage 1) those of all stages.

    Args:
        path: save root with its `latest`, or the folder of one step.
        vocab_size: token ids that exist; the rest of the rows is padding.

    Returns:
        Its options, and its parameters in fp32 by our name, whole, each read when asked for.

    Raises:
        CheckpointError: damage, ranks that do not fit together, or a pickle that names what is not
            data.
        UnsupportedError: a model that mcore does not compute.
    """
    ranks = read_ranks(path)
    if ranks[0].args is None:
        raise CheckpointError(
            f"{path} holds no arguments of Megatron-DeepSpeed; for a Hugging Face model give its "
            "config.json with --hf-config"
        )
    options = options_from_args(ranks[0].args, vocab_size)
    tp = _tensor_parallel_size(ranks)
    parts = _parts_by_name(ranks, tp)
    if not options.untie_embeddings_and_output_weights:
        _drop_copy(parts)

    def make(name: str) -> Tensor:
        return _cut(options, name, merged(name, [w.make() for w in parts[name]], options.swiglu))

    like = {}
    for name, weights in parts.items():
        outlines = [torch.empty(weight.shape, device="meta") for weight in weights]
        try:
            like[name] = _cut(options, name, merged(name, outlines, options.swiglu))
        except RuntimeError as error:
            raise CheckpointError(f"tensor-parallel ranks do not fit: {name}") from error
    check_shapes(options, like)
    return options, ModelTensors(like, make)


def _tensor_parallel_size(ranks: Sequence[ModelRank]) -> int:
    values: Any = ranks[0].args
    tp = (values if isinstance(values, Mapping) else vars(values)).get("tensor_model_parallel_size")
    if not isinstance(tp, int) or tp < 1 or len(ranks) % tp:
        raise CheckpointError(
            f"there are {len(ranks)} model-parallel ranks, which tensor_model_parallel_size = {tp} "
            "does not divide"
        )
    return tp


def _parts_by_name(ranks: Sequence[ModelRank], tp: int) -> dict[str, list[Weight]]:
    """The tensor-parallel parts of each parameter, by our names."""
    own = _names({name for rank in ranks for name in rank.weights})
    parts: dict[str, list[Weight]] = {}
    for start in range(0, len(ranks), tp):
        stage = [rank.weights for rank in ranks[start : start + tp]]
        for name in stage[0]:
            absent = [start + i for i, weights in enumerate(stage) if name not in weights]
            if absent:
                raise CheckpointError(f"model-parallel ranks {absent} do not hold {name}")
            if name in own:  # a tied copy on a later stage is the same
                parts.setdefault(own[name], [weights[name] for weights in stage])
    return parts


def _names(names: Iterable[str]) -> dict[str, str]:
    """Our name of each parameter; buffers that hold nothing to load have none."""
    kept = [name for name in names if not is_ignored(name)]
    matches = {name: _PIPELINE.fullmatch(name.removeprefix("module.")) for name in kept}
    layers = sorted(
        {
            int(match.group(1))
            for match in matches.values()
            if match and match.group(1) and _IN_LAYER.match(match.group(2))
        }
    )
    own = {}
    for name, match in matches.items():
        if match is None:
            own[name] = canonical_name(name)
        elif match.group(1) and int(match.group(1)) in layers:
            layer = layers.index(int(match.group(1)))
            own[name] = canonical_name(f"decoder.layers.{layer}.{match.group(2)}")
        else:
            own[name] = _outside_layers(match.group(2))
    return own


def _outside_layers(rest: str) -> str:
    """Our name of a parameter before or after the layers of a pipeline."""
    if rest in ("weight", "bias"):
        return f"decoder.final_layernorm.{rest}"
    return _OUTPUT if rest == "lm_head.weight" else f"embedding.{rest}"


def _drop_copy(parts: dict[str, list[Weight]]) -> None:
    """Take the copy of a tied embedding away; it has to be one."""
    copy = parts.pop(_OUTPUT, None)
    for mine, theirs in zip(copy or (), parts.get(_EMBEDDING, ()), strict=False):
        if mine is not theirs and not torch.equal(mine.make(), theirs.make()):
            raise CheckpointError("the tied output layer differs from the embedding")


def _cut(options: ModelOptions, name: str, tensor: Tensor) -> Tensor:
    """The tensor without the vocabulary's padding."""
    return tensor[: options.vocab_size].contiguous() if name in (_EMBEDDING, _OUTPUT) else tensor


class _HfTensors:
    """Tensors of a folder and the configuration of the Hugging Face model that they are of."""

    def __init__(self, path: Path, config: dict[str, Any], weights: Mapping[str, Weight]) -> None:
        self.path, self.config, self._weights = path, config, weights

    def names(self) -> set[str]:
        return set(self._weights)

    def outline(self, name: str) -> Tensor:
        return torch.empty(self._weights[name].shape, device="meta")

    def tensor(self, name: str) -> Tensor:
        return self._weights[name].make()


def read_hf_deepspeed(
    path: str | os.PathLike[str], hf_config: str | os.PathLike[str]
) -> tuple[dict[str, Any], ModelTensors]:
    """The Hugging Face model in a DeepSpeed folder of ZeRO stage 0 to 3.

    Args:
        path: save root with its `latest`, or the folder of one step.
        hf_config: the model's config.json.

    Returns:
        Its options, and its parameters in fp32 by our name, whole, each read when asked for.

    Raises:
        CheckpointError: damage, tensors that do not fit, or a pickle that names what is not data.
        UnsupportedError: a model that mcore does not compute, or one of several model-parallel
            ranks.
    """
    ranks = read_ranks(path)
    if len(ranks) > 1:
        raise UnsupportedError(f"{path} is of {len(ranks)} model-parallel ranks; one is read")
    weights = {name.removeprefix("module."): w for name, w in ranks[0].weights.items()}
    return state_of(_HfTensors(Path(path), read_json(Path(hf_config)), weights))
