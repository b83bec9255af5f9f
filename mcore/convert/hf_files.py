"""A folder of the Hugging Face kind: config.json and one or several safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mcore.checkpoint.metadata import DTYPES
from mcore.checkpoint.shard_file import ShardItem, write_shard
from mcore.errors import CheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Hugging Face's own limit for one file.
_MAX_FILE_BYTES = 5 * 10**9


class HfFolder:
    """Reads the tensors of a folder one by one.

    Raises:
        CheckpointError: no folder, no safetensors, or damage; the message names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / CONFIG)
        self._files = self._find_files()

    def _find_files(self) -> dict[str, Path]:
        """The file of each tensor; where there is a single one, transformers ignores an index."""
        single = self.path / SINGLE
        if single.is_file():
            try:
                with safe_open(single, "pt") as file:
                    return dict.fromkeys(file.keys(), single)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {single}: {error}") from error
        if not (self.path / INDEX).is_file():
            pickles = sorted(p.name for p in self.path.glob("*.bin"))
            hint = f"; {pickles[0]} is a pickle: save it as safetensors" if pickles else ""
            raise CheckpointError(f"{self.path} holds neither {SINGLE} nor {INDEX}{hint}")
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict):
            raise CheckpointError(f"{self.path / INDEX} has no weight_map")
        return {name: self._inside(file) for name, file in index.items()}

    def _inside(self, file: Any) -> Path:
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{self.path / INDEX} names {file!r}, outside of its folder")
        return self.path / file

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def outline(self, name: str) -> Tensor:
        """Shape and type of a tensor, on the `meta` device; its elements are not read."""
        path = self._files[name]
        try:
            with safe_open(path, "pt") as file:
                part = file.get_slice(name)
                shape, dtype = part.get_shape(), DTYPES.get(part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name} from {path}: {error}") from error
        if dtype is None:
            raise CheckpointError(f"{name} in {path} is of a type that is not read")
        return torch.empty(shape, dtype=dtype, device="meta")

    def tensor(self, name: str) -> Tensor:
        """A tensor on the CPU."""
        path = self._files[name]
        try:
            with safe_open(path, "pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name} from {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: no such file, or it is something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def write_folder(
    path: Path,
    config: Mapping[str, Any],
    tensors: Iterable[ShardItem],
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Write a folder; tensors are fetched one by one, as each is written.

    Raises:
        CheckpointError: the disk is full, or the like.
    """
    parts: list[Path] = []
    try:
        path.mkdir(parents=True, exist_ok=True)
        contents = _write_parts(path, tensors, max_file_bytes, parts)
        for old in (*path.glob("model*.safetensors"), path / INDEX):
            if old not in parts:
                old.unlink(missing_ok=True)
        _name_parts(path, parts, contents)
        (path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def _write_parts(
    path: Path, tensors: Iterable[ShardItem], limit: int, parts: list[Path]
) -> list[dict[str, int]]:
    """Write numbered files, appended to `parts`; returns the names and bytes of what is in each."""
    contents: list[dict[str, int]] = []
    for group in _groups(tensors, limit):
        part = path / f"model.part{len(parts)}.safetensors"
        part.unlink(missing_ok=True)
        parts.append(part)
        write_shard(part, group)
        contents.append({item.name: item.nbytes for item in group})
    return contents


def _groups(tensors: Iterable[ShardItem], limit: int) -> Iterator[list[ShardItem]]:
    """What goes into one file each."""
    group: list[ShardItem] = []
    for item in tensors:
        if group and sum(other.nbytes for other in group) + item.nbytes > limit:
            yield group
            group = []
        group.append(item)
    yield group


def _name_parts(path: Path, parts: list[Path], contents: list[dict[str, int]]) -> None:
    """Give the files their final names, which tell their number, and write the index."""
    count = len(parts)
    weight_map: dict[str, str] = {}
    for i, (part, inside) in enumerate(zip(parts, contents, strict=True)):
        final = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        part.rename(path / final)
        weight_map |= dict.fromkeys(inside, final)
    if count > 1:
        total = sum(sum(inside.values()) for inside in contents)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
