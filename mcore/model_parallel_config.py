"""Megatron's path of `ModelParallelConfig`."""

from mcore.config.parallel import ModelParallelConfig

__all__ = ["ModelParallelConfig"]
