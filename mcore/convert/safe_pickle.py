"""Files of other programs that are pickles, read without running anything in them.

Tensors and plain containers load. `argparse.Namespace` and classes of `megatron`, `deepspeed` and
`transformer_engine` become inert placeholders: nothing is imported and nothing called. Any other
name is refused.
"""

from __future__ import annotations

import codecs
import io
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mcore.errors import CheckpointError

_INERT_PACKAGES = ("megatron", "deepspeed", "transformer_engine")
_INERT_NAMES = ("argparse.Namespace", "_io.BytesIO", "io.BytesIO")
#: Random states hold NumPy arrays: these four make an array out of a byte string.
_ARRAYS: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": codecs.encode,
}
_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")

#: What the metadata of `torch.distributed.checkpoint` is made of.
_DCP_CLASSES = {
    metadata: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo",),
    planner: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
}


class Placeholder:
    """An object of a class that is not ours to load: its attributes, and no behaviour."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        self.args = args
        self.__dict__.update(attributes)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})


def load_torch_file(file: Path | IO[bytes], where: str) -> Any:
    """What `torch.save` wrote, on the CPU; a file is mapped, its tensors are read when used.

    Args:
        file: the file, or its content.
        where: its name, for messages.

    Raises:
        CheckpointError: it is damaged, or it names something that is not data.
    """
    try:
        mapped = isinstance(file, Path) and zipfile.is_zipfile(file)
        if isinstance(file, Path) and mapped:
            _check_zip_sizes(file)
        names = get_unsafe_globals_in_checkpoint(file)
        _rewind(file)
        with safe_globals(_allowed(names, where)):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except CheckpointError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        text = str(error).splitlines()
        raise CheckpointError(f"cannot read {where}: {text[0] if text else error!r}") from error


def _rewind(file: Path | IO[bytes]) -> None:
    if not isinstance(file, Path):
        file.seek(0)


def _check_zip_sizes(path: Path) -> None:
    """Refuse an archive that would unpack to more than it is."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > path.stat().st_size:
        raise CheckpointError(f"{path} would unpack to {unpacked} bytes: it is no file of torch")


def _allowed(names: Iterable[str], where: str) -> list[Any]:
    """Objects for the names that a file uses beyond torch's own."""
    reconstruct = np.zeros(1).__reduce__()[0]
    allowed: list[Any] = []
    for name in names:
        if name in _INERT_NAMES or name.partition(".")[0] in _INERT_PACKAGES:
            allowed.append((_placeholder(name), name))
        elif name in _RECONSTRUCT:
            allowed.append((reconstruct, name))
        elif name in _ARRAYS:
            allowed.append((_ARRAYS[name], name))
        elif name.startswith("numpy.dtypes."):
            allowed.append((type(np.dtype(np.uint32)), name))
        else:
            raise CheckpointError(
                f"{where} wants to load {name}, which is not data: it is refused unread"
            )
    if any(name in _RECONSTRUCT for name in names):
        allowed += [type(np.dtype(kind)) for kind in (np.uint32, np.int64, np.float64)]
    return allowed


def _placeholder(name: str) -> type[Placeholder]:
    return type(name.rpartition(".")[2], (Placeholder,), {"__module__": "placeholder"})


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and nothing else."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        for package, names in _DCP_CLASSES.items():
            if module == package.__name__ and name.partition(".")[0] in names:
                return getattr(package, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) in (("pathlib", "PosixPath"), ("pathlib", "Path")):
            return _joined
        if module.partition(".")[0] in _INERT_PACKAGES:
            return _placeholder(f"{module}.{name}")
        raise CheckpointError(
            f"{self._where} wants to load {module}.{name}, which is not data: it is refused unread"
        )


def _layout(name: str) -> torch.layout:
    """The only layout of memory that checkpoints of models have."""
    if name != "torch.strided":
        raise CheckpointError(f"a tensor has the layout {name}; only torch.strided is read")
    return torch.strided


def _joined(*parts: str) -> str:
    return "/".join(map(str, parts))


def load_dcp_metadata(path: Path) -> metadata.Metadata:
    """The pickled metadata of a `torch.distributed.checkpoint` folder.

    Raises:
        CheckpointError: it is absent or damaged, or it names something that is not data.
    """
    try:
        value = _MetadataUnpickler(path.read_bytes(), str(path)).load()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except CheckpointError:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        MemoryError,
    ) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(value, metadata.Metadata):
        raise CheckpointError(f"{path} holds no metadata of torch.distributed.checkpoint")
    return value
