"""Megatron-Core's `torch_dist` checkpoints: the model's weights in.

Source: `torch.distributed.checkpoint`'s file-system format. Tensors of all layers lie under one key
with the layer as first dimension, or under a key for each layer.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from mcore.convert.megatron_args import options_from_args
from mcore.convert.megatron_legacy import as_model, iteration_folder
from mcore.convert.megatron_names import canonical_name
from mcore.convert.model_options import ModelOptions
from mcore.convert.safe_pickle import load_dcp_metadata, load_torch_file
from mcore.errors import CheckpointError

_COMMON = "common_state/shard_0_1"
_IGNORED = re.compile(r"(optimizer|rng_state|rerun_state|common_state)\b.*|.*_extra_state.*")
_ALL_LAYERS = re.compile(r"decoder\.layers\.(?!\d)(.+)")


def read_torch_dist(
    path: str | os.PathLike[str], vocab_size: int | None = None
) -> tuple[ModelOptions, dict[str, Tensor]]:
    """The model in a `torch_dist` folder.

    Args:
        path: save root, or the folder of one iteration.
        vocab_size: token ids that exist; the rest of the rows is padding.

    Returns:
        Its options, and its parameters by our name, whole.

    Raises:
        CheckpointError: damage, or a pickle that names what is not data.
        UnsupportedError: a model that mcore does not compute.
    """
    folder = iteration_folder(Path(path))
    reader = _Reader(folder)
    common = reader.common()
    if not isinstance(common, Mapping) or "args" not in common:
        raise CheckpointError(f"{folder} does not hold the arguments of the run")
    options = options_from_args(common["args"], vocab_size)
    tensors: dict[str, Tensor] = {}
    for key in reader.model_keys():
        tensor = reader.tensor(key)
        match = _ALL_LAYERS.fullmatch(key)
        if match is None:
            tensors[canonical_name(key)] = tensor
            continue
        for layer, part in enumerate(tensor.unbind()):
            name = canonical_name(f"decoder.layers.{layer}.{match.group(1)}")
            tensors[name] = part.contiguous()
    return options, as_model(options, tensors)


def is_torch_dist(path: str | os.PathLike[str]) -> bool:
    """Whether a save root, or the folder of one iteration, is of this format."""
    return (iteration_folder(Path(path)) / ".metadata").is_file()


class _Reader:
    """Reads tensors and objects of a folder by key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._metadata: Metadata = load_dcp_metadata(folder / ".metadata")
        if not isinstance(self._metadata.storage_data, dict):
            raise CheckpointError(f"{folder / '.metadata'} does not say where tensors lie")

    def model_keys(self) -> list[str]:
        """Keys of the model's tensors."""
        return [
            key
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and not _IGNORED.fullmatch(key)
        ]

    def common(self) -> Any:
        """State that is no tensor: a file of its own, or an object among the others."""
        path = self._folder / "common.pt"
        if path.is_file():
            return load_torch_file(path, str(path))
        if not isinstance(self._metadata.state_dict_metadata.get(_COMMON), BytesStorageMetadata):
            raise CheckpointError(f"{self._folder} has neither common.pt nor {_COMMON}")
        value = self._load(MetadataIndex(_COMMON))
        return value[0] if isinstance(value, list) and value else value

    def tensor(self, key: str) -> Tensor:
        """A whole tensor."""
        record = self._metadata.state_dict_metadata[key]
        assert isinstance(record, TensorStorageMetadata)
        parts = []
        for chunk in record.chunks:
            part = self._load(MetadataIndex(key, chunk.offsets))
            if not isinstance(part, Tensor) or part.shape != chunk.sizes:
                raise CheckpointError(f"{key} in {self._folder} is not as its metadata says")
            parts.append((chunk, part))
        if sum(part.numel() for _, part in parts) != record.size.numel():
            raise CheckpointError(f"the parts of {key} in {self._folder} do not make it up")
        whole = torch.empty(record.size, dtype=record.properties.dtype)
        for chunk, part in parts:
            target = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                if start < 0 or start + size > record.size[dim]:
                    raise CheckpointError(f"a part of {key} in {self._folder} lies outside of it")
                target = target.narrow(dim, start, size)
            target.copy_(part)
        return whole

    def _load(self, index: MetadataIndex) -> Any:
        found = self._metadata.storage_data.get(index)
        if found is None:
            raise CheckpointError(f"{self._folder} does not say where {index.fqn} lies")
        name = str(found.relative_path)
        if Path(name).name != name:
            raise CheckpointError(f"{self._folder} names the file {name!r}, outside of it")
        if found.transform_descriptors:
            raise CheckpointError(f"{index.fqn} in {self._folder} is compressed, which is not read")
        path = self._folder / name
        try:
            size = path.stat().st_size
            if found.offset < 0 or found.length < 0 or found.offset + found.length > size:
                raise CheckpointError(f"{path} is damaged: {index.fqn} lies beyond its end")
            with path.open("rb") as file:
                file.seek(found.offset)
                data = file.read(found.length)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        return load_torch_file(io.BytesIO(data), f"{index.fqn} in {path}")
