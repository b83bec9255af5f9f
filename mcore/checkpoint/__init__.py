"""Checkpoints that every layout can save and any other can load. See docs/checkpoint_format.md."""

from mcore.checkpoint.commit import complete_iterations, find_checkpoint, latest_iteration
from mcore.checkpoint.loader import LoadResult, load
from mcore.checkpoint.rank_local import RankLocal
from mcore.checkpoint.reader import CheckpointReader, read_common, read_tensors
from mcore.checkpoint.saver import save
from mcore.checkpoint.sharded_tensor import (
    Rectangle,
    ShardedTensor,
    sharded_parameter,
    whole_tensor,
)

__all__ = [
    "CheckpointReader",
    "LoadResult",
    "RankLocal",
    "Rectangle",
    "ShardedTensor",
    "complete_iterations",
    "find_checkpoint",
    "latest_iteration",
    "load",
    "read_common",
    "read_tensors",
    "save",
    "sharded_parameter",
    "whole_tensor",
]
