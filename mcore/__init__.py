"""Megatron-style 3D-parallel pretraining: one small code base, the same numbers at every layout.

The names below load on first use. `import mcore` itself loads no torch, since the data tools with
their worker processes need none, and signal handlers have to stand before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mcore.version import __version__

if TYPE_CHECKING:
    from mcore import parallel_state, tensor_parallel
    from mcore.config.parallel import ModelParallelConfig

__all__ = ["ModelParallelConfig", "__version__", "parallel_state", "tensor_parallel"]


def __getattr__(name: str) -> Any:
    """Import what `__all__` names, when it is asked for."""
    if name == "ModelParallelConfig":
        return importlib.import_module("mcore.config.parallel").ModelParallelConfig
    if name in __all__:
        return importlib.import_module(f"mcore.{name}")
    raise AttributeError(f"module 'mcore' has no attribute {name!r}")
