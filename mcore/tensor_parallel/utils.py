"""Small helpers of the parallel layers: exact division, splits, vocabulary ranges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore.errors import ShapeError
from mcore.parallel_state import tensor_model_parallel_group_or
from mcore.tensor_parallel.mappings import AnyGroup
from mcore.topology.collectives import all_gather_along_dim


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise `ShapeError` unless the first number is a multiple of the second."""
    if numerator % denominator:
        raise ShapeError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Exact quotient; `ShapeError` where there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[Tensor]:
    """Split [..., n] into `num_partitions` tensors [..., n / num_partitions].

    Args:
        tensor: the tensor.
        num_partitions: number of equal parts.
        contiguous_split_chunks: copy each part into memory of its own rather than return views.

    Raises:
        ShapeError: the last dimension does not divide.
    """
    size = divide(tensor.shape[-1], num_partitions)
    parts = torch.split(tensor, size, dim=-1)
    return [part.contiguous() for part in parts] if contiguous_split_chunks else list(parts)


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: AnyGroup | None = None
) -> Tensor:
    """This tensor-parallel rank's run of a tensor's elements, [numel / t].

    Args:
        tensor: any shape, equal on all ranks.
        new_buffer: copy the run into memory of its own rather than return a view.
        tp_group: tensor-parallel group, this process's own when None.

    Raises:
        ShapeError: the number of elements does not divide by t.
    """
    group = tensor_model_parallel_group_or(tp_group)
    size = divide(tensor.numel(), group.size)
    run = tensor.reshape(-1).narrow(0, group.rank * size, size)
    return run.clone() if new_buffer else run


def gather_split_1d_tensor(tensor: Tensor, tp_group: AnyGroup | None = None) -> Tensor:
    """Put together what `split_tensor_into_1d_equal_chunks` split, [numel], without autograd.

    Comm: one all-gather over the tensor-parallel group.
    """
    group = tensor_model_parallel_group_or(tp_group)
    return all_gather_along_dim(tensor.detach().reshape(-1), 0, group)


class VocabUtility:
    """Ranges of vocabulary rows by rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """First and one-past-last row of a rank that holds `per_partition_vocab_size` rows."""
        if not 0 <= rank < world_size:
            raise ShapeError(f"rank {rank} is outside a group of {world_size}")
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(
        global_vocab_size: int, rank: int, world_size: int
    ) -> Sequence[int]:
        """First and one-past-last row of a rank when the whole vocabulary divides evenly."""
        return VocabUtility.vocab_range_from_per_partition_vocab_size(
            divide(global_vocab_size, world_size), rank, world_size
        )
