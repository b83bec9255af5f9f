"""Parameters and gradients of one dtype in two flat buffers, cut into buckets.

Parameters lie in reverse order of registration, which is about the order in which backward
completes their gradients, so that the first buckets fill first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore.distributed.bucket import Bucket
from mcore.topology.group import Group

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


def aligned(numel: int) -> int:
    """Elements that a parameter takes up in a buffer."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def plan_buffer(numels: Sequence[int], bucket_size: int | None) -> BufferLayout:
    """Lay parameters out one after the other and close a bucket whenever it is large enough.

    Args:
        numels: elements of each parameter, in buffer order.
        bucket_size: elements that close a bucket; None = one bucket.
    """
    starts, buckets = [], []
    end = bucket_start = first = 0
    for i, numel in enumerate(numels):
        starts.append(end)
        end += aligned(numel)
        is_full = bucket_size is not None and end - bucket_start >= bucket_size
        if is_full or i == len(numels) - 1:
            buckets.append((bucket_start, end, range(first, i + 1)))
            bucket_start, first = end, i + 1
    return BufferLayout(tuple(starts), tuple(buckets), end)


class ParamAndGradBuffer:
    """The flat buffers of one parameter dtype.

    Parameters become views of `param_data`; each gets `main_grad`, its view of `grad_data`.

    Args:
        params: parameters of one dtype and device, with their registration numbers, in registration
            order.
        grad_dtype: dtype in which gradients are accumulated and reduced.
        bucket_size: elements that close a bucket; None = one bucket.
        group: ranks that gradients are summed over.
    """

    def __init__(
        self,
        params: Sequence[tuple[int, nn.Parameter]],
        grad_dtype: torch.dtype,
        bucket_size: int | None,
        group: Group,
    ) -> None:
        ordered = list(reversed(params))
        example = ordered[0][1]
        self.params = tuple(param for _, param in ordered)
        self.layout = plan_buffer([param.numel() for param in self.params], bucket_size)
        self.param_data = _zeros(self.layout.numel, example.dtype, example.device)
        for param, start in zip(self.params, self.layout.starts, strict=True):
            view = _view(self.param_data, start, param)
            view.copy_(param.detach())
            param.data = view
        self.grad_data = _zeros(self.layout.numel, grad_dtype, example.device)
        for param, start in zip(self.params, self.layout.starts, strict=True):
            param.main_grad = _view(self.grad_data, start, param)  # type: ignore[attr-defined]
        self.buckets = [
            Bucket(
                self.grad_data[start:end],
                [self.params[i] for i in members],
                min(ordered[i][0] for i in members),
                group,
            )
            for start, end, members in self.layout.buckets
        ]

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        self.grad_data.zero_()

    def scale_grad(self, factor: float | Tensor) -> None:
        """Multiply every gradient by a number or a 0-dimensional tensor."""
        self.grad_data.mul_(factor)


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _view(flat: Tensor, start: int, param: nn.Parameter) -> Tensor:
    return flat[start : start + param.numel()].view(param.shape)
