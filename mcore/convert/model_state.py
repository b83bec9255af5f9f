"""A model without training state in our checkpoint format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.checkpoint import CheckpointReader, save
from mcore.checkpoint.deferred import DeferredTensor
from mcore.checkpoint.sharded_tensor import ShardedTensor
from mcore.errors import CheckpointError

_PREFIX = "model."


class ModelTensors(Mapping[str, Tensor]):
    """Parameters of a model by name, whole, each read or made when it is asked for.

    Args:
        like: shape and type of each, as tensors on the `meta` device.
        make: gives one by its name.
    """

    def __init__(self, like: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
        self.like = dict(like)
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.like:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)


def outline_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Shape and type of a parameter, on the `meta` device; `ModelTensors` do not read it."""
    if isinstance(tensors, ModelTensors):
        return tensors.like[name]
    return torch.empty_like(tensors[name], device="meta")


def save_model_state(
    root: str | os.PathLike[str],
    options: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    source: Mapping[str, Any],
) -> Path:
    """Write a model as iteration 0, without optimizer state.

    Args:
        root: save root.
        options: options that define the model, under Megatron's names.
        tensors: parameters by name, with global shapes; `ModelTensors` are made one by one.
        source: where it comes from, for people.
    """
    common = {
        "model": dict(options),
        "iteration": 0,
        "consumed_train_samples": 0,
        "source": dict(source),
    }
    state: dict[str, ShardedTensor | Tensor] = {}
    if isinstance(tensors, ModelTensors):
        for name, like in tensors.like.items():
            state[_PREFIX + name] = DeferredTensor(
                _PREFIX + name, like, partial(tensors.__getitem__, name)
            )
    else:
        state |= {_PREFIX + name: tensor for name, tensor in tensors.items()}
    return save(root, 0, state, common)


def load_model_state(
    path: str | os.PathLike[str], iteration: int | None = None
) -> tuple[dict[str, Any], ModelTensors]:
    """Options and parameters of the model in any of our checkpoints.

    Args:
        path: save root, or the directory of one iteration.
        iteration: which one; None = the one that the pointer names.

    Raises:
        CheckpointError: no such checkpoint, or it does not say what model it holds.
    """
    reader = CheckpointReader(path, iteration)
    options = reader.common.get("model")
    if not isinstance(options, dict):
        raise CheckpointError(f"{reader.directory} does not say the options of its model")
    like = {
        key.removeprefix(_PREFIX): torch.empty(record.shape, dtype=record.dtype, device="meta")
        for key, record in reader.metadata.tensors.items()
        if key.startswith(_PREFIX)
    }
    return options, ModelTensors(like, lambda name: reader.tensor(_PREFIX + name))
