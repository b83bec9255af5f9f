"""Files of other programs that are pickles, read without running anything in them.

Tensors and plain containers load. Namespaces, signals, paths and classes of `megatron`, `deepspeed`
and `transformer_engine` become inert placeholders: nothing is imported and nothing called. Any
other name is refused.
"""

from __future__ import annotations

import codecs
import io
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from mcore.convert.old_torch_file import names_in_old_file
from mcore.errors import CheckpointError

_INERT_PACKAGES = ("megatron", "deepspeed", "transformer_engine")
#: `pathlib.PosixPath` as the versions of Python call it.
_PATHS = ("pathlib.PosixPath", "pathlib._local.PosixPath")
_INERT_NAMES = (
    "argparse.Namespace",
    "types.SimpleNamespace",
    "_io.BytesIO",
    "io.BytesIO",
    "signal.Signals",
    "torch._C.Generator",
    *_PATHS,
)
#: Random states hold NumPy arrays: these four make an array out of a byte string.
_ARRAYS: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "_codecs.encode": codecs.encode,
}
#: What torch says when it refuses a name.
_REFUSED = re.compile(r"GLOBAL (\S+)")
#: Tensors may claim the bytes of their file so many times, and a little.
_SHARING = 4
_SMALL_BYTES = 2**20
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
    """What `torch.save` wrote, on the CPU; an archive is mapped, its tensors are read when used.

    What torch wrote before its version 1.6 is no archive and is read whole.

    Args:
        file: the file, or its content.
        where: its name, for messages.

    Raises:
        CheckpointError: it is damaged, or it names something that is not data.
    """
    try:
        return _load(file, where)
    except CheckpointError:
        raise
    except (
        OSError,
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        EOFError,
        LookupError,
        MemoryError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
    ) as error:
        refused = _REFUSED.search(str(error))
        if refused is not None:
            raise CheckpointError(_refusal(where, refused.group(1))) from error
        text = str(error).splitlines()
        raise CheckpointError(f"cannot read {where}: {text[0] if text else error!r}") from error


def _load(file: Path | IO[bytes], where: str) -> Any:
    size = file.stat().st_size if isinstance(file, Path) else file.seek(0, io.SEEK_END)
    is_archive = zipfile.is_zipfile(file)
    _rewind(file)
    if is_archive:
        _check_archive(file, size, where)
        names = get_unsafe_globals_in_checkpoint(file)
        _rewind(file)
    elif isinstance(file, Path):
        # torch refuses by itself what it does not know, and names it.
        names = [name for name in names_in_old_file(file) if _is_ours(name)]
    else:
        raise CheckpointError(f"{where} is no file of torch.save")
    with safe_globals(_allowed(names, where)):
        mapped = is_archive and isinstance(file, Path)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    _check_tensors(content, size, where)
    return content


def _rewind(file: Path | IO[bytes]) -> None:
    if not isinstance(file, Path):
        file.seek(0)


def _check_archive(file: Path | IO[bytes], size: int, where: str) -> None:
    """Refuse an archive that would unpack to more than it is."""
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    _rewind(file)
    if unpacked > size:
        raise CheckpointError(f"{where} would unpack to {unpacked} bytes: it is no file of torch")


def _check_tensors(content: Any, size: int, where: str) -> None:
    """Refuse tensors that repeat the bytes of a file until memory is full.

    Shared storages (a tied embedding, views of a flat buffer) count once for each tensor.
    """
    claimed, seen, waiting = 0, set(), [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise CheckpointError(f"{where} holds a tensor of the layout {value.layout}")
            claimed += value.numel() * value.element_size()
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += _members(value)
    if claimed > _SHARING * size + _SMALL_BYTES:
        raise CheckpointError(
            f"{where} has {size} bytes and its tensors claim {claimed}: it is damaged"
        )


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    return vars(value).values() if isinstance(value, Placeholder) else ()


def _is_ours(name: str) -> bool:
    """Whether a name, unknown to torch, is one that this module has a stand-in for."""
    return (
        name in (*_INERT_NAMES, *_RECONSTRUCT, *_ARRAYS)
        or name.partition(".")[0] in _INERT_PACKAGES
        or name.startswith("numpy.dtypes.")
    )


def _refusal(where: str, name: str) -> str:
    return f"{where} wants to load {name}, which is not data: it is refused unread"


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
            raise CheckpointError(_refusal(where, name))
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
        if f"{module}.{name}" in ("pathlib.Path", *_PATHS):
            return _joined
        if module.partition(".")[0] in _INERT_PACKAGES:
            return _placeholder(f"{module}.{name}")
        raise CheckpointError(_refusal(self._where, f"{module}.{name}"))


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
