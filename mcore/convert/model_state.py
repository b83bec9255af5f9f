"""A model without training state in our checkpoint format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore.checkpoint import CheckpointReader, save
from mcore.errors import CheckpointError

_PREFIX = "model."


class ModelTensors(Mapping[str, Tensor]):
    """Parameters of a checkpoint by name, whole, each read when it is asked for."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        keys = reader.keys()
        self._names = [key.removeprefix(_PREFIX) for key in keys if key.startswith(_PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._reader.tensor(_PREFIX + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
        tensors: parameters by name, with global shapes.
        source: where it comes from, for people.
    """
    common = {
        "model": dict(options),
        "iteration": 0,
        "consumed_train_samples": 0,
        "source": dict(source),
    }
    return save(root, 0, {_PREFIX + name: tensor for name, tensor in tensors.items()}, common)


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
    return options, ModelTensors(reader)
