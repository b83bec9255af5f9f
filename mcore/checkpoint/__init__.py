"""Checkpoints that every layout can save and any other can load. See docs/checkpoint_format.md."""

from mcore.checkpoint.aftercare import Aftercare
from mcore.checkpoint.async_saver import AsyncSaver
from mcore.checkpoint.canonical import Difference, differences, dump
from mcore.checkpoint.commit import (
    complete_iterations,
    find_checkpoint,
    foreign_iterations,
    iteration_of,
    latest_iteration,
    unfinished_iterations,
)
from mcore.checkpoint.fallback import candidates, first_good
from mcore.checkpoint.loader import LoadResult, Source, load
from mcore.checkpoint.rank_local import RankLocal
from mcore.checkpoint.reader import (
    CheckpointReader,
    read_common,
    read_common_together,
    read_tensors,
)
from mcore.checkpoint.retention import Retention
from mcore.checkpoint.saver import save
from mcore.checkpoint.sharded_tensor import (
    Rectangle,
    ShardedTensor,
    sharded_parameter,
    whole_tensor,
)
from mcore.checkpoint.verify import leftovers, verify

__all__ = [
    "Aftercare",
    "AsyncSaver",
    "CheckpointReader",
    "Difference",
    "LoadResult",
    "RankLocal",
    "Rectangle",
    "Retention",
    "ShardedTensor",
    "Source",
    "candidates",
    "complete_iterations",
    "differences",
    "dump",
    "find_checkpoint",
    "first_good",
    "foreign_iterations",
    "iteration_of",
    "latest_iteration",
    "leftovers",
    "load",
    "read_common",
    "read_common_together",
    "read_tensors",
    "save",
    "sharded_parameter",
    "unfinished_iterations",
    "verify",
    "whole_tensor",
]
