"""Hugging Face models in and out, without the transformers library."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mcore.checkpoint.shard_file import ShardItem
from mcore.convert.hf_family import HfFamily
from mcore.convert.hf_files import CONFIG, HfFolder, write_folder
from mcore.convert.hf_gpt2 import Gpt2
from mcore.convert.hf_llama import Llama, Mistral, Qwen2, Qwen3
from mcore.convert.model_options import ModelOptions, check_shapes
from mcore.convert.model_state import ModelTensors, outline_of
from mcore.convert.rules import Rule
from mcore.errors import CheckpointError, UnsupportedError

FAMILIES: tuple[HfFamily, ...] = (Gpt2(), Llama(), Mistral(), Qwen2(), Qwen3())


class NamedTensors(Protocol):
    """A Hugging Face model: a folder, or tensors from elsewhere with the model's configuration."""

    path: Path
    config: dict[str, Any]

    def names(self) -> set[str]:
        """Names of all tensors."""

    def outline(self, name: str) -> Tensor:
        """Shape and type of a tensor, on the `meta` device."""

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU."""


def hf_to_state(hf_dir: str | os.PathLike[str]) -> tuple[dict[str, Any], ModelTensors]:
    """Read a folder with config.json and safetensors.

    Args:
        hf_dir: the folder; the configuration may be of transformers 4 or 5.

    Returns:
        The options that define the model, under Megatron's names, and its parameters by name with
        global shapes (`linear_qkv` by query group, `linear_fc1` = gate above up, no tied output),
        in the types of the file. Each is read when it is asked for.

    Raises:
        CheckpointError: no such folder, damage, tensors that are absent, unknown or do not fit.
        UnsupportedError: a model that mcore does not compute; the message names the option.
    """
    return state_of(HfFolder(Path(hf_dir)))


def state_of(folder: NamedTensors) -> tuple[dict[str, Any], ModelTensors]:
    """Options and parameters of a model; see `hf_to_state`."""
    family = _family_of(folder)
    try:
        options = family.options(folder.config)
    except KeyError as error:
        raise CheckpointError(f"{folder.path / CONFIG} has no entry {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder.path / CONFIG} has an impossible value: {error}") from error
    names = {family.full_name(name): name for name in folder.names()}
    rules = {rule.name: rule for rule in family.rules(options)}
    like = {name: _outline(folder, rule, names) for name, rule in rules.items()}

    def make(name: str) -> Tensor:
        parts = [folder.tensor(names[source]) for source in rules[name].sources]
        return rules[name].join(parts).contiguous()

    tensors = ModelTensors(like, make)
    check_shapes(options, tensors)
    used = {source for rule in rules.values() for source in rule.sources}
    rest = {full: name for full, name in names.items() if full not in used}
    _check_rest(family, folder, rest, tensors)
    return options.as_dict(), tensors


def _outline(folder: NamedTensors, rule: Rule, names: Mapping[str, str]) -> Tensor:
    """Shape and type of a parameter of ours."""
    absent = [source for source in rule.sources if source not in names]
    if absent:
        raise CheckpointError(f"{folder.path} holds no tensor {', '.join(absent)}")
    parts = [folder.outline(names[source]) for source in rule.sources]
    try:
        return rule.join(parts)
    except RuntimeError as error:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise CheckpointError(
            f"{' and '.join(rule.sources)} of {shapes} do not fit the configuration"
        ) from error


def _family_of(folder: NamedTensors) -> HfFamily:
    model_type = folder.config.get("model_type")
    if folder.config.get("quantization_config"):
        raise UnsupportedError("quantization_config: quantised models cannot be converted")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise UnsupportedError(f"model_type is {model_type!r}; these can be converted: {known}")


def _check_rest(
    family: HfFamily, folder: NamedTensors, rest: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    """Nothing that the model uses may be left behind."""
    unused = {full: name for full, name in rest.items() if not family.buffers.fullmatch(full)}
    copy = unused.pop("lm_head.weight", None)
    if copy is not None:
        embedding = tensors["embedding.word_embeddings.weight"]
        if not torch.equal(folder.tensor(copy), embedding):
            raise CheckpointError(
                "tie_word_embeddings is set, but lm_head.weight differs from the embedding; set it "
                f"to false in {folder.path / CONFIG}"
            )
    if unused:
        raise CheckpointError(
            f"{folder.path} holds tensors that no {family.model_type} model has: "
            f"{', '.join(sorted(unused))}"
        )


def state_to_hf(
    model_options: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    hf_dir: str | os.PathLike[str],
    model_type: str | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that transformers 4 and 5 load.

    Args:
        model_options: options that define the model, under Megatron's names.
        tensors: its parameters by name, with global shapes; taken one by one.
        hf_dir: the folder; weights and configuration that are there are replaced.
        model_type: the family; the first that fits when None.
        token_ids: entries of the configuration for special tokens; none are said when None.

    Raises:
        CheckpointError: parameters that do not fit the options, or a full disk.
        UnsupportedError: no family fits; the message names the options.
    """
    options = ModelOptions.from_mapping(model_options)
    family = fitting_family(options, model_type)
    absent = options.shapes().keys() - tensors.keys()
    if absent:
        raise CheckpointError(f"parameters are absent: {', '.join(sorted(absent))}")
    unknown = tensors.keys() - options.shapes().keys()
    if unknown:
        raise CheckpointError(f"the options do not know parameters {', '.join(sorted(unknown))}")
    embedding = outline_of(tensors, "embedding.word_embeddings.weight")
    dtype = str(embedding.dtype).removeprefix("torch.")
    ids = {"bos_token_id": None, "eos_token_id": None} if token_ids is None else dict(token_ids)
    config = family.config(options) | {
        "model_type": family.model_type,
        "vocab_size": options.vocab_size,
        **ids,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    write_folder(Path(hf_dir), config, list(_translated(family, options, tensors)))


def fitting_family(options: ModelOptions, model_type: str | None = None) -> HfFamily:
    """The family that a model belongs to.

    Args:
        options: of the model.
        model_type: the only family to consider; None = the first that fits.

    Raises:
        UnsupportedError: there is none; the message says for each why.
    """
    reasons = []
    for family in FAMILIES:
        if model_type not in (None, family.model_type):
            continue
        misfits = family.misfits(options)
        if not misfits:
            return family
        reasons.append(f"{family.model_type}: {', '.join(misfits)}")
    raise UnsupportedError(f"no Hugging Face family fits this model ({'; '.join(reasons)})")


def _translated(
    family: HfFamily, options: ModelOptions, tensors: Mapping[str, Tensor]
) -> Iterator[ShardItem]:
    shapes = options.shapes()
    for rule in family.rules(options):
        outline = outline_of(tensors, rule.name)
        if tuple(outline.shape) != shapes[rule.name]:
            raise CheckpointError(
                f"{rule.name} has shape {list(outline.shape)}, the options say "
                f"{list(shapes[rule.name])}"
            )
        parts = _Parts(rule, tensors)
        for i, (source, part) in enumerate(zip(rule.sources, rule.split(outline), strict=True)):
            place = (0,) * part.dim()
            yield ShardItem(source, place, tuple(part.shape), part.dtype, partial(parts.take, i))


class _Parts:
    """What a parameter becomes: it is read for the first part and let go with the last."""

    def __init__(self, rule: Rule, tensors: Mapping[str, Tensor]) -> None:
        self._rule, self._tensors = rule, tensors
        self._parts: dict[int, Tensor] = {}

    def take(self, number: int) -> Tensor:
        if number not in self._parts:
            self._parts = dict(enumerate(self._rule.split(self._tensors[self._rule.name])))
        return self._parts.pop(number)
