"""DeepSpeed's ZeRO checkpoints: the model's weights in fp32, without DeepSpeed.

Source: the folders that DeepSpeed writes. Stages 1 and 2 hold, for each group of parameters, one
flat fp32 vector that is dealt to the data-parallel ranks in equal parts; stage 3 deals out each
parameter by itself. Without ZeRO the weights are in the module's own type.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.convert.safe_pickle import load_torch_file
from mcore.errors import CheckpointError, UnsupportedError

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def read_deepspeed(path: str | os.PathLike[str]) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """The weights in a DeepSpeed folder.

    Args:
        path: save root with its `latest`, or the folder of one step.

    Returns:
        For each model-parallel rank its tensors by the module's own names, in fp32 where ZeRO keeps
        them so; and the caller's state of the first rank (`args` and the like).

    Raises:
        CheckpointError: damage, files that are absent, or a pickle that names what is not data.
        UnsupportedError: a folder of the pipeline engine.
    """
    folder = _step_folder(Path(path))
    models: dict[int, dict[int, Path]] = {}
    shards: dict[int, dict[int, Path]] = {}
    for entry in sorted(folder.iterdir()):
        if match := _MODEL.fullmatch(entry.name):
            models.setdefault(int(match.group(2)), {})[int(match.group(1) or 0)] = entry
        elif match := _OPTIMIZER.fullmatch(entry.name):
            shards.setdefault(int(match.group(2)), {})[int(match.group(1))] = entry
    if not models:
        if any(folder.glob("layer_*-model_*")):
            raise UnsupportedError(f"{folder} is of the pipeline engine, which is not read")
        raise CheckpointError(f"{folder} holds no mp_rank_*_model_states.pt")
    if sorted(models) != list(range(len(models))):
        raise CheckpointError(f"{folder} holds the model-parallel ranks {sorted(models)} only")
    states = [_mapping(models[rank][min(models[rank])]) for rank in sorted(models)]
    ranks = [
        _rank_tensors(state, _in_order(shards.get(rank, {}), folder), models[rank])
        for rank, state in enumerate(states)
    ]
    return ranks, dict(states[0])


def _step_folder(root: Path) -> Path:
    pointer = root / "latest"
    if not pointer.is_file():
        if not root.is_dir():
            raise CheckpointError(f"there is no directory {root}")
        return root
    tag = pointer.read_text(encoding="utf-8").strip()
    if Path(tag).name != tag or not (root / tag).is_dir():
        raise CheckpointError(f"{pointer} names {tag!r}, and there is no such folder in {root}")
    return root / tag


def _in_order(shards: Mapping[int, Path], folder: Path) -> list[Path]:
    if sorted(shards) != list(range(len(shards))):
        raise CheckpointError(f"{folder} holds the optimizer states of ranks {sorted(shards)} only")
    return [shards[rank] for rank in sorted(shards)]


def _mapping(path: Path) -> Mapping[str, Any]:
    content = load_torch_file(path, str(path))
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} is no checkpoint of DeepSpeed")
    return content


def _rank_tensors(
    state: Mapping[str, Any], shards: Sequence[Path], models: Mapping[int, Path]
) -> dict[str, Tensor]:
    """Tensors of one model-parallel rank."""
    module = {
        name: tensor for name, tensor in state["module"].items() if isinstance(tensor, Tensor)
    }
    if not shards:
        return module
    optimizers = [_mapping(path)["optimizer_state_dict"] for path in shards]
    stage = optimizers[0]["zero_stage"]
    count = optimizers[0]["partition_count"]
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(shards):
        raise CheckpointError(f"{len(shards)} of {count} parts of the optimizer are there")
    groups: list[Mapping[str, Any]] = list(state["param_shapes"])
    if stage == 3:
        frozen = _frozen(models)
        flats = [
            torch.cat([group.flatten() for group in o["fp32_flat_groups"]]) for o in optimizers
        ]
        tensors = frozen | _stage_three(groups, flats)
        buffers = {name: module[name] for name in state.get("buffer_names") or () if name in module}
    elif stage in (1, 2):
        flats_of = [o["single_partition_of_fp32_groups"] for o in optimizers]
        tensors = _stage_two(groups, flats_of)
        buffers = {name: tensor for name, tensor in module.items() if name not in tensors}
    else:
        raise CheckpointError(f"{shards[0]} is of ZeRO stage {stage!r}")
    for name, of in state.get("shared_params") or ():
        if of in tensors:
            tensors[name] = tensors[of]
    return {**{k: v for k, v in buffers.items() if k not in tensors}, **tensors}


def _stage_two(
    groups: Sequence[Mapping[str, Any]], flats: Sequence[Sequence[Tensor]]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for number, group in enumerate(groups):
        whole = torch.cat([flat[number].flatten() for flat in flats])
        start = 0
        for name, shape in group.items():
            tensors[name] = _slice(name, whole, start, tuple(shape))
            start += math.prod(shape)
    return tensors


def _stage_three(groups: Sequence[Mapping[str, Any]], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    start = 0
    for group in groups:
        for name, shape in group.items():
            part = -(-math.prod(shape) // len(flats))
            whole = torch.cat([_slice(name, flat, start, (part,)) for flat in flats])
            tensors[name] = _slice(name, whole, 0, tuple(shape))
            start += part
    return tensors


def _frozen(models: Mapping[int, Path]) -> dict[str, Tensor]:
    """Parameters that are not trained: fragments on each data-parallel rank."""
    states = [_mapping(models[rank]) for rank in sorted(models)]
    shapes = states[0].get("frozen_param_shapes") or {}
    return {
        name: _slice(
            name,
            torch.cat([state["frozen_param_fragments"][name].flatten() for state in states]),
            0,
            tuple(shape),
        )
        for name, shape in shapes.items()
    }


def _slice(name: str, flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape)
    if start + size > flat.numel():
        raise CheckpointError(f"the parts of the optimizer end before {name}")
    return flat[start : start + size].view(shape).clone()
