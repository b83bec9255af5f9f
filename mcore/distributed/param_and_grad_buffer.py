"""Parameters and gradients of one dtype in flat buffers, cut into buckets.

Parameters lie in reverse order of registration, which is about the order in which backward
completes their gradients, so that the first buckets fill first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore.distributed.bucket import BucketSpan, buckets_of, make_buckets
from mcore.distributed.sharding_groups import ShardingGroups

# A parameter starts at a multiple of this many elements: 128 bytes at 2 bytes each, which is what
# vectorised kernels and matrix products like, and the same alignment as a tensor of its own has.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Where parameters lie in a flat buffer.

    Attributes:
        starts: first element of each parameter.
        buckets: for each bucket its first element, end, and the range of parameters in it.
        numel: elements of the buffer, padding included.
    """

    starts: tuple[int, ...]
    buckets: tuple[tuple[int, int, range], ...]
    numel: int


def aligned(numel: int, parts: int = 1) -> int:
    """Elements that a parameter takes up in a buffer, or a bucket that is dealt to `parts` ranks.

    A shard starts where a parameter could.
    """
    multiple = ALIGNMENT * parts
    return -(-numel // multiple) * multiple


def plan_buffer(
    numels: Sequence[int],
    bucket_size: int | None,
    *,
    shards: int = 1,
    alone: Collection[int] = (),
) -> BufferLayout:
    """Lay parameters out one after the other and close a bucket whenever it is large enough.

    Args:
        numels: elements of each parameter, in buffer order.
        bucket_size: elements that close a bucket; None = one bucket.
        shards: ranks that a bucket is dealt to in even runs; it is padded until it divides.
        alone: numbers of parameters that have a bucket of their own, so that they are dealt alike
            wherever they occur.
    """
    starts, buckets = [], []
    end = bucket_start = first = 0
    for i, numel in enumerate(numels):
        starts.append(end)
        end += aligned(numel)
        is_full = bucket_size is not None and end - bucket_start >= bucket_size
        is_cut = i in alone or i + 1 in alone
        if is_full or is_cut or i == len(numels) - 1:
            end = bucket_start + aligned(end - bucket_start, shards)
            buckets.append((bucket_start, end, range(first, i + 1)))
            bucket_start, first = end, i + 1
    return BufferLayout(tuple(starts), tuple(buckets), end)


class ParamAndGradBuffer:
    """The flat buffers of one parameter dtype.

    Parameters become views of `param_data`. Gradients lie in `grad_data`, or in the buckets where
    they are not kept whole.

    Args:
        params: parameters of one dtype and device, with their registration numbers, in registration
            order.
        grad_dtype: dtype in which gradients are accumulated and reduced.
        bucket_size: elements that close a bucket; None = one bucket.
        groups: ranks that gradients are summed over and dealt to.
        stage: ZeRO stage, 0 to 2.
        alone: registration numbers of parameters that get a bucket of their own.
    """

    def __init__(
        self,
        params: Sequence[tuple[int, nn.Parameter]],
        grad_dtype: torch.dtype,
        bucket_size: int | None,
        groups: ShardingGroups,
        *,
        stage: int = 0,
        alone: Collection[int] = (),
    ) -> None:
        ordered = list(reversed(params))
        example = ordered[0][1]
        self.params = tuple(param for _, param in ordered)
        self.layout = plan_buffer(
            [param.numel() for param in self.params],
            bucket_size,
            shards=groups.shard.size if stage else 1,
            alone={i for i, (number, _) in enumerate(ordered) if number in alone},
        )
        self.param_data = torch.zeros(self.layout.numel, dtype=example.dtype, device=example.device)
        for param, start in zip(self.params, self.layout.starts, strict=True):
            view = self.param_data[start : start + param.numel()].view(param.shape)
            view.copy_(param.detach())
            param.data = view
        kind = buckets_of(stage)
        self.grad_data = None
        if not kind.streams:
            self.grad_data = torch.zeros(self.layout.numel, dtype=grad_dtype, device=example.device)
        spans = [
            BucketSpan(
                end - start,
                grad_dtype,
                tuple((self.params[i], self.layout.starts[i] - start) for i in members),
                min(ordered[i][0] for i in members),
            )
            for start, end, members in self.layout.buckets
        ]
        self.buckets = make_buckets(kind, spans, self.param_data, self.grad_data, groups)

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        for bucket in self.buckets:
            bucket.zero_grad()

    def scale_grad(self, factor: float | Tensor) -> None:
        """Multiply every gradient by a number or a 0-dimensional tensor."""
        for bucket in self.buckets:
            bucket.scale_grad(factor)
