"""Runs of the flat gradient buffer that are reduced over data-parallel ranks in one collective.

| strategy | class | gradients between reductions | a reduction |
|---|---|---|---|
| no_shard | `Bucket` | whole, on every rank | all-reduce |
| optim | `ShardedBucket` | whole, on every rank | reduce-scatter, once a step |
| optim_grads | `StreamedBucket` | this rank's shard | reduce-scatter, every microbatch |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mcore.distributed.sharding_groups import ShardingGroups
from mcore.topology.collectives import (
    Pending,
    all_reduce_,
    start_all_gather_into_,
    start_all_reduce_,
    start_reduce_scatter_into_,
)


@dataclass(frozen=True, slots=True)
class BucketSpan:
    """What lies in a bucket.

    Attributes:
        numel: elements, padding included.
        dtype: of the gradients.
        members: parameters with their first element in the bucket.
        position: registration number of its first-registered parameter, whose gradient comes last.
    """

    numel: int
    dtype: torch.dtype
    members: tuple[tuple[nn.Parameter, int], ...]
    position: int


class Bucket:
    """Gradients that are reduced together, and how far this step has got with them.

    Args:
        span: what lies in it.
        param_data: its part of the parameter buffer, 1-D.
        grad_data: its part of the gradient buffer, 1-D; None where gradients are not kept whole.
        groups: ranks that gradients are summed over.
    """

    #: Whether every microbatch is reduced, rather than their sum once a step.
    streams = False

    def __init__(
        self,
        span: BucketSpan,
        param_data: Tensor,
        grad_data: Tensor | None,
        groups: ShardingGroups,
    ) -> None:
        self.span = span
        self.param_data = param_data
        self.position = span.position
        self.params = tuple(param for param, _ in span.members)
        self.grad_data = self._place(grad_data)
        self._groups = groups
        self._starts = {id(param): start for param, start in span.members}
        self._ready: set[int] = set()
        self._pending: Pending | None = None
        self.is_started = False

    def _place(self, grad_data: Tensor | None) -> Tensor:
        """Give every parameter its view of the gradients as `main_grad`."""
        assert grad_data is not None
        for param, start in self.span.members:
            view = grad_data[start : start + param.numel()].view(param.shape)
            param.main_grad = view  # type: ignore[attr-defined]
        return grad_data

    @property
    def is_ready(self) -> bool:
        """Whether every gradient is complete."""
        return len(self._ready) == len(self.params)

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that a parameter's gradient is complete for this step."""
        self._ready.add(id(param))

    def accumulate(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add the gradient of a backward."""
        main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
        main_grad.add_(grad)

    def start_reduce(self) -> None:
        """Start the sum over data-parallel ranks.

        Comm: one all-reduce, op sum, over dp-cp, in the buffer's dtype, not normalised.
        """
        assert not self.is_started
        self.is_started = True
        self._pending = start_all_reduce_(self.grad_data, self._groups.all)

    def wait(self) -> None:
        """Wait for the sum; on CUDA the current stream waits, not the host."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def reset(self) -> None:
        """Get ready for the next step; a reduction under way (of an abandoned step) ends first."""
        self.wait()
        self._ready.clear()
        self.is_started = False

    def zero_grad(self) -> None:
        """Set every gradient to zero."""
        self.grad_data.zero_()

    def scale_grad(self, factor: float | Tensor) -> None:
        """Multiply the reduced gradients by a number or a 0-dimensional tensor."""
        self.reduced.mul_(factor)

    @property
    def reduced(self) -> Tensor:
        """The gradients that this rank has the sum of, 1-D."""
        return self.grad_data

    def run_of(self, param: nn.Parameter) -> tuple[int, int]:
        """First element and number of elements of a parameter that are this rank's to update."""
        return 0, param.numel()

    def own_data(self, param: nn.Parameter) -> Tensor:
        """What this rank updates of a parameter, shaped as the parameter or 1-D."""
        return param.detach()

    def own_grad(self, param: nn.Parameter) -> Tensor:
        """The gradient of `own_data`."""
        grad: Tensor = param.main_grad  # type: ignore[attr-defined]
        return grad


class ShardedBucket(Bucket):
    """A bucket whose reduced gradients and updated parameters are dealt to the ranks.

    Each rank has a run of `numel / ranks` elements, wherever parameters begin and end.
    """

    def __init__(
        self,
        span: BucketSpan,
        param_data: Tensor,
        grad_data: Tensor | None,
        groups: ShardingGroups,
    ) -> None:
        length = span.numel // groups.shard.size
        self._shard = (groups.shard.rank * length, (groups.shard.rank + 1) * length)
        self._gathering: Pending | None = None
        super().__init__(span, param_data, grad_data, groups)

    def start_reduce(self) -> None:
        """Start the sum over data-parallel ranks.

        Comm: one reduce-scatter over the ranks that share the optimizer state, op sum; `wait` adds
            one all-reduce of the shard over its replicas, if there are any.
        """
        assert not self.is_started
        self.is_started = True
        self._pending = start_reduce_scatter_into_(self.grad_data, self._groups.shard)

    def wait(self) -> None:
        """Wait for the sum, then sum over the replicas of the shard."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            all_reduce_(self.reduced, self._groups.replica)

    @property
    def reduced(self) -> Tensor:
        """This rank's shard of the gradients."""
        start, end = self._shard
        return self.grad_data[start:end]

    def run_of(self, param: nn.Parameter) -> tuple[int, int]:
        """The elements of a parameter that lie in this rank's shard."""
        first = self._starts[id(param)]
        start = max(first, self._shard[0])
        end = min(first + param.numel(), self._shard[1])
        return (start - first, end - start) if start < end else (0, 0)

    def own_data(self, param: nn.Parameter) -> Tensor:
        """The parameter's elements in this rank's shard, 1-D."""
        start, numel = self.run_of(param)
        start += self._starts[id(param)]
        return self.param_data[start : start + numel]

    def own_grad(self, param: nn.Parameter) -> Tensor:
        """Their gradient, 1-D."""
        start, numel = self.run_of(param)
        start += self._starts[id(param)] - self._shard[0]
        return self.reduced[start : start + numel]

    def start_param_gather(self) -> None:
        """Start collecting every rank's updated parameters.

        Comm: one all-gather over the ranks that share the optimizer state.
        """
        self.wait_for_params()
        self._gathering = start_all_gather_into_(self.param_data, self._groups.shard)

    def wait_for_params(self) -> None:
        """Wait until the parameters are whole again."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None


class StreamedBucket(ShardedBucket):
    """A sharded bucket that keeps only its shard of the gradients.

    A microbatch's gradients are collected in a buffer that lives until they are reduced.
    """

    streams = True

    def _place(self, grad_data: Tensor | None) -> Tensor:
        """This rank's shard of the gradients; parameters get no `main_grad`."""
        assert grad_data is None
        self._whole: Tensor | None = None
        start, end = self._shard
        return _zeros(end - start, self.span.dtype, self.param_data.device)

    @property
    def reduced(self) -> Tensor:
        """This rank's shard of the gradients."""
        return self.grad_data

    def accumulate(self, param: nn.Parameter, grad: Tensor) -> None:
        """Put the gradient of a backward into the microbatch's buffer."""
        if self._whole is None:
            self._whole = _zeros(self.span.numel, self.span.dtype, self.param_data.device)
        start = self._starts[id(param)]
        self._whole[start : start + param.numel()].view(param.shape).add_(grad)

    def start_reduce(self) -> None:
        """Start the sum of this microbatch over data-parallel ranks.

        Comm: one reduce-scatter over the ranks that share the optimizer state, op sum; `wait` adds
            one all-reduce of the shard over its replicas, if there are any.
        """
        assert not self.is_started
        self.is_started = True
        if self._whole is None:  # a rank without gradients takes part all the same
            self._whole = _zeros(self.span.numel, self.span.dtype, self.param_data.device)
        self._pending = start_reduce_scatter_into_(self._whole, self._groups.shard)

    def wait(self) -> None:
        """Wait for the sum, add it to the shard and free the microbatch's buffer."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        assert self._whole is not None
        start, end = self._shard
        self.grad_data.add_(all_reduce_(self._whole[start:end], self._groups.replica))
        self._whole = None

    def zero_grad(self) -> None:
        """Set the shard to zero and forget an abandoned microbatch."""
        self.grad_data.zero_()
        self._whole = None


def buckets_of(stage: int) -> type[Bucket]:
    """The kind of bucket of a ZeRO stage (0, 1 or 2)."""
    return (Bucket, ShardedBucket, StreamedBucket)[stage]


def make_buckets(
    kind: type[Bucket],
    spans: Sequence[BucketSpan],
    param_data: Tensor,
    grad_data: Tensor | None,
    groups: ShardingGroups,
) -> list[Bucket]:
    """Buckets over consecutive runs of the parameter and gradient buffers."""
    sizes = [span.numel for span in spans]
    params = param_data.split(sizes)
    grads = [None] * len(spans) if grad_data is None else grad_data.split(sizes)
    return [
        kind(span, param, grad, groups)
        for span, param, grad in zip(spans, params, grads, strict=True)
    ]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)
