"""Megatron-style 3D-parallel pretraining: one small code base, the same numbers at every layout."""

from mcore import parallel_state, tensor_parallel
from mcore.config.parallel import ModelParallelConfig
from mcore.version import __version__

__all__ = ["ModelParallelConfig", "__version__", "parallel_state", "tensor_parallel"]
