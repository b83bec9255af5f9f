"""The state of training in one form that no layout shows through: to keep whole, or to compare."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore.checkpoint.metadata import CheckpointMetadata
from mcore.checkpoint.rank_local import is_rank_local
from mcore.checkpoint.reader import CheckpointReader
from mcore.checkpoint.shard_file import ShardItem, write_shard
from mcore.errors import CheckpointError

#: Members of a checkpoint's JSON state that say how far training is, whatever the layout.
_PROGRESS = (
    "iteration",
    "consumed_train_samples",
    "skipped_iterations",
    "skipped_train_samples",
    "optimizer",
    "opt_param_scheduler",
    "grad_scaler",
)
#: Members that decide what follows as well; those of an older checkpoint lack them.
_WHAT_FOLLOWS = ("data_segments", "evaluation_is_owed", "autopilot", "passed_over_samples")
#: Longer values, such as the losses that the autopilot remembers, are cut where they are told.
_MOST_CHARACTERS = 120


def canonical_keys(metadata: CheckpointMetadata) -> list[str]:
    """Keys of everything but the state of single ranks, sorted."""
    return sorted(key for key in metadata.tensors if not is_rank_local(key))


def dump(reader: CheckpointReader, path: Path) -> int:
    """Write a checkpoint as one safetensors file with whole tensors, one in memory at a time.

    Two checkpoints of the same state give the same bytes, whatever layouts saved them.
    `__metadata__` of the file holds the progress of training, each member as JSON.

    Args:
        reader: the checkpoint.
        path: file to write; it must not exist.

    Returns:
        Number of tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, or the file cannot be written.
    """
    tensors = reader.metadata.tensors
    keys = canonical_keys(reader.metadata)
    keys.sort(key=lambda key: -tensors[key].dtype.itemsize)  # stable: by name within a width
    items = [
        ShardItem(
            name=key,
            offsets=(0,) * len(tensors[key].shape),
            sizes=tensors[key].shape,
            dtype=tensors[key].dtype,
            fetch=lambda key=key: reader.tensor(key),  # type: ignore[misc]
        )
        for key in keys
    ]
    progress = {
        name: json.dumps(reader.common[name], sort_keys=True)
        for name in _PROGRESS
        if name in reader.common
    }
    try:
        write_shard(path, items, progress)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
    return len(items)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which two checkpoints differ.

    Attributes:
        what: key of a tensor, or name of a member of the JSON state.
        how: in words.
        largest: largest absolute difference of two elements; None where that means nothing.
    """

    what: str
    how: str
    largest: float | None = None


def differences(first: CheckpointReader, second: CheckpointReader) -> Iterator[Difference]:
    """In what two checkpoints differ, the state of single ranks aside; nothing = same state.

    Raises:
        CheckpointError: one of them is damaged.
    """
    yield from _state_differences(first.common, second.common)
    tensors = (first.metadata.tensors, second.metadata.tensors)
    keys = (set(canonical_keys(first.metadata)), set(canonical_keys(second.metadata)))
    for key in sorted(keys[0] | keys[1]):
        if key not in keys[1]:
            yield Difference(key, "only in the first")
        elif key not in keys[0]:
            yield Difference(key, "only in the second")
        elif tensors[0][key].shape != tensors[1][key].shape:
            shapes = [list(side[key].shape) for side in tensors]
            yield Difference(key, f"shape {shapes[0]} and {shapes[1]}")
        elif tensors[0][key].dtype != tensors[1][key].dtype:
            yield Difference(key, f"type {tensors[0][key].dtype} and {tensors[1][key].dtype}")
        else:
            yield from _compare(key, first.tensor(key), second.tensor(key))


def _state_differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Difference]:
    for name in (*_PROGRESS, *_WHAT_FOLLOWS, "model"):
        pairs = [_flat(name, side.get(name)) for side in (first, second)]
        if name in _WHAT_FOLLOWS:  # nothing of it is as if it were not there
            pairs = [
                {
                    k: v
                    for k, v in side.items()
                    if v is not False and v != [] and (k, v) != ("passed_over_samples", 0)
                }
                for side in pairs
            ]
        for member in sorted(pairs[0].keys() | pairs[1].keys()):
            values = [side.get(member) for side in pairs]
            if values[0] != values[1]:
                yield Difference(member, " and ".join(map(_short, values)))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """The leaves of a member, by their path."""
    if value and isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {f"{i}": item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return {} if value is None else {name: value}
    return {k: v for key, item in value.items() for k, v in _flat(f"{name}.{key}", item).items()}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _compare(key: str, first: Tensor, second: Tensor) -> Iterator[Difference]:
    """Bit for bit, so that NaN equals itself and 0.0 is not -0.0."""
    flat = [tensor.reshape(-1).contiguous() for tensor in (first, second)]
    bits = (
        [tensor.view(torch.uint8).view(len(tensor), -1) for tensor in flat] if len(flat[0]) else []
    )
    count = int((bits[0] != bits[1]).any(-1).sum()) if bits else 0
    if count:
        wide = [tensor.double() for tensor in flat]
        largest = float((wide[0] - wide[1]).abs().max())
        how = f"{count} of {first.numel()} elements, largest difference {largest:.3g}"
        yield Difference(key, how, largest)
