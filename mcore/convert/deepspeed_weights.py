"""The fp32 weights in the folders that DeepSpeed writes, found without DeepSpeed.

Stages 1 and 2 of ZeRO hold, for each group of parameters, one flat fp32 vector that is dealt to the
data-parallel ranks in equal runs; stage 3 deals out each parameter by itself. Without ZeRO the
weights are in the module's own type. Files are mapped: what is not asked for is not read.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.convert.megatron_legacy import read_pointer
from mcore.convert.safe_pickle import load_torch_file
from mcore.errors import CheckpointError, UnsupportedError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of one model-parallel rank.

    Attributes:
        shape: of that rank's part.
        make: reads its elements, as fp32 where it is a floating-point number.
    """

    shape: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class ModelRank:
    """What the files say of one model-parallel rank.

    Attributes:
        weights: parameters, and buffers that are stored, by the module's own names.
        args: the arguments of the run as Megatron-DeepSpeed stores them; None where it is another
            program's.
    """

    weights: dict[str, Weight]
    args: Any


def read_ranks(path: str | os.PathLike[str]) -> list[ModelRank]:
    """The model-parallel ranks in a DeepSpeed folder, in order.

    Args:
        path: save root with its `latest`, or the folder of one step.

    Raises:
        CheckpointError: damage, files that are absent, or a pickle that names what is not data.
        UnsupportedError: experts, or a folder without ZeRO of the pipeline engine.
    """
    folder = _step_folder(Path(path))
    models: dict[int, dict[int, Path]] = {}
    shards: dict[int, dict[int, Path]] = {}
    for entry in sorted(folder.iterdir()):
        if match := _MODEL.fullmatch(entry.name):
            models.setdefault(int(match.group(2)), {})[int(match.group(1) or 0)] = entry
        elif match := _OPTIMIZER.fullmatch(entry.name):
            shards.setdefault(int(match.group(2)), {})[int(match.group(1))] = entry
        elif "expert" in entry.name:
            raise UnsupportedError(f"{entry} is of a model with experts, which mcore lacks")
    if sorted(models) != list(range(len(models))) or not models:
        raise CheckpointError(
            f"{folder} holds the mp_rank_*_model_states.pt of the ranks {sorted(models)}"
        )
    if not shards and any(_LAYER.fullmatch(entry.name) for entry in folder.iterdir()):
        raise UnsupportedError(f"{folder} is of the pipeline engine without ZeRO: use its stage 1")
    return [
        _rank([models[rank][i] for i in sorted(models[rank])], _in_order(shards, rank, folder))
        for rank in sorted(models)
    ]


def _step_folder(root: Path) -> Path:
    pointer = root / "latest"
    if not pointer.is_file():
        if not root.is_dir():
            raise CheckpointError(f"there is no directory {root}")
        return root
    tag = read_pointer(pointer)
    if tag in ("", "..") or Path(tag).name != tag or not (root / tag).is_dir():
        raise CheckpointError(f"{pointer} names {tag!r}, and there is no such folder in {root}")
    return root / tag


def _in_order(shards: Mapping[int, Mapping[int, Path]], rank: int, folder: Path) -> list[Path]:
    found = shards.get(rank, {})
    if sorted(found) != list(range(len(found))) or (shards and not found):
        raise CheckpointError(
            f"{folder} holds, for the model-parallel rank {rank}, the *_optim_states.pt of the "
            f"data-parallel ranks {sorted(found)} only"
        )
    return [found[i] for i in sorted(found)]


def _state(path: Path) -> State:
    content = load_torch_file(path, str(path))
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} is no checkpoint of DeepSpeed")
    return content


def _rank(models: Sequence[Path], shards: Sequence[Path]) -> ModelRank:
    """One model-parallel rank: its model file(s) and the parts of its optimizer."""
    states = [_state(path) for path in models]
    optimizers = [_state(path).get("optimizer_state_dict") for path in shards]
    try:
        weights = _weights(states, [o for o in optimizers if o is not None])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{models[0]} and its optimizer states are not as DeepSpeed writes them: {error!r}"
        ) from error
    return ModelRank(weights, states[0].get("args"))


def _weights(states: Sequence[State], optimizers: Sequence[State]) -> dict[str, Weight]:
    first = states[0]
    module: State = first.get("module") or {}
    if not optimizers:
        kept = [name for name, value in module.items() if isinstance(value, Tensor)]
        return {name: _whole(module[name]) for name in kept}
    _check_count(optimizers)
    groups: Sequence[Mapping[str, Any]] = first["param_shapes"]
    weights = {name: _whole(module[name]) for name in first["buffer_names"] if name in module}
    weights |= dict(_frozen(states))
    if "fp32_flat_groups" in optimizers[0]:
        weights |= _stage_three(groups, [o["fp32_flat_groups"] for o in optimizers])
    else:
        flats = [o["single_partition_of_fp32_groups"] for o in optimizers]
        weights |= _stage_two(groups, flats, optimizers[0].get("param_alignment_paddings"))
    for name, of in (first.get("shared_params") or {}).items():
        if of in weights:
            weights[name] = weights[of]
    return weights


def _check_count(optimizers: Sequence[State]) -> None:
    count = optimizers[0]["partition_count"]
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(optimizers):
        raise CheckpointError(f"{len(optimizers)} of {count} parts of the optimizer are there")


def _whole(tensor: Tensor) -> Weight:
    return Weight(tuple(tensor.shape), lambda: _fp32(tensor).clone())


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _stage_two(
    groups: Sequence[Mapping[str, Any]],
    flats: Sequence[Sequence[Tensor]],
    paddings: Sequence[Sequence[int]] | None,
) -> dict[str, Weight]:
    """`flats[data-parallel rank][group]`: runs of the flat vector of a group, in order."""
    weights: dict[str, Weight] = {}
    for number, group in enumerate(groups):
        parts = [flat[number] for flat in flats]
        after = paddings[number] if paddings is not None else [0] * len(group)
        start = 0
        for (name, sizes), padding in zip(group.items(), after, strict=True):
            shape = tuple(sizes)
            _check_length(name, parts, start + math.prod(shape))
            weights[name] = Weight(shape, partial(_parameter, [parts], start, shape))
            start += math.prod(shape) + padding
    return weights


def _stage_three(
    groups: Iterable[Mapping[str, Any]], flats: Sequence[Sequence[Tensor]]
) -> dict[str, Weight]:
    """`flats[data-parallel rank]`: vectors that together hold the rank's run of each parameter."""
    weights: dict[str, Weight] = {}
    start = 0
    for name, sizes in (item for group in groups for item in group.items()):
        shape = tuple(sizes)
        length = -(-math.prod(shape) // len(flats))
        for parts in flats:
            _check_length(name, parts, start + length)
        weights[name] = Weight(shape, partial(_parameter, flats, start, shape))
        start += length
    return weights


def _frozen(states: Sequence[State]) -> Iterator[tuple[str, Weight]]:
    """Parameters that are not trained: whole, or under stage 3 a run on each rank."""
    for name, sizes in (states[0].get("frozen_param_shapes") or {}).items():
        shape = tuple(sizes)
        runs = [[state["frozen_param_fragments"][name].flatten()] for state in states]
        length = -(-math.prod(shape) // len(runs))
        for parts in runs:
            _check_length(name, parts, length)
        yield name, Weight(shape, partial(_parameter, runs, 0, shape))


def _check_length(name: str, parts: Sequence[Tensor], wanted: int) -> None:
    if sum(part.numel() for part in parts) < wanted:
        raise CheckpointError(f"the parts of the optimizer end before {name} does")


def _parameter(ranks: Sequence[Sequence[Tensor]], start: int, shape: tuple[int, ...]) -> Tensor:
    """A parameter of which each rank holds an equal run, at `start` of its joined vectors."""
    size = math.prod(shape)
    length = -(-size // len(ranks))
    runs = [run for parts in ranks for run in _run(parts, start, length)]
    return _fp32(torch.cat(runs)[:size].view(shape)).clone()


def _run(parts: Iterable[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Elements `[start, start + length)` of vectors that follow one another."""
    for part in parts:
        begin, end = max(start, 0), min(start + length, part.numel())
        if begin < end:
            yield part.flatten()[begin:end]
        start -= part.numel()
