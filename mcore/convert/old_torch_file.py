"""What `torch.save` wrote before torch 1.6: pickles one after another, then the storages.

torch still reads such a file. Here it is only looked through, by an unpickler for which every name
is a thing without behaviour: which names it uses, and how much memory it would take.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from mcore.errors import CheckpointError

#: First of the pickles in such a file.
_MAGIC = 0x1950A86A20F9469CFC6C
#: Those before the content: magic number, version, facts of the machine.
_HEAD = 3
_ITEM_BYTES = {
    "DoubleStorage": 8,
    "FloatStorage": 4,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "LongStorage": 8,
    "IntStorage": 4,
    "ShortStorage": 2,
    "CharStorage": 1,
    "ByteStorage": 1,
    "BoolStorage": 1,
}


class _Inert:
    """Stands for whatever a pickle names: takes everything, does nothing."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        """Whatever it would be made of is dropped."""

    def __setstate__(self, state: Any) -> None:
        """Likewise what it would hold."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Likewise its items."""

    def append(self, item: Any) -> None:
        """Likewise."""

    def extend(self, items: Any) -> None:
        """Likewise."""


class _Look(pickle.Unpickler):
    """Collects the names and the storages of the pickles in a file."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names: set[str] = set()
        self.storages: dict[Any, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A class that does nothing; nothing is imported."""
        self.names.add(f"{module}.{name}")
        return type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Take note of a storage: kind, key, device, number of elements."""
        match pid:
            case ("storage", type() as kind, key, _, int(numel), *_) if (
                kind.__name__ in _ITEM_BYTES and numel >= 0
            ):
                self.storages[key] = numel * _ITEM_BYTES[kind.__name__]
                return _Inert()
        raise pickle.UnpicklingError(f"{str(pid)[:80]} is no storage of a tensor")


def names_in_old_file(path: Path) -> set[str]:
    """The names that such a file uses, those of torch and of plain containers among them.

    Raises:
        CheckpointError: it is none, or it would take more memory than it has bytes.
        pickle.UnpicklingError: damage; the like of it as `EOFError`, `ValueError`, `TypeError`,
            `AttributeError`, `KeyError` and `IndexError`.
    """
    names: set[str] = set()
    with path.open("rb") as file:
        if _Look(file).load() != _MAGIC:
            raise CheckpointError(f"{path} is no file of torch.save")
        for _ in range(_HEAD - 1):
            _Look(file).load()
        content = _Look(file)
        content.load()
        names |= content.names
    claimed = sum(content.storages.values())
    if claimed > path.stat().st_size:
        raise CheckpointError(f"{path} would take {claimed} bytes of memory: it is damaged")
    return names
