"""Data parallelism: every rank has the whole model chunk; gradients are summed over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed.bucket import Bucket
from mcore.distributed.param_and_grad_buffer import ParamAndGradBuffer, aligned
from mcore.distributed.replicas import find_replicas
from mcore.errors import ScheduleError
from mcore.parallel_state import parallel_context_or_single
from mcore.topology.collectives import broadcast_
from mcore.topology.context import ParallelContext


class DistributedDataParallel(nn.Module):
    """A model chunk whose gradients are accumulated in flat buffers and summed once per step.

    Each trained parameter gets `main_grad`, its view of the gradient buffer. Autograd's gradient of
    every backward is added to it and freed. An operation may also add its parameter gradient to
    `main_grad` itself and return None for it; the parameter counts as complete all the same, once
    autograd has visited each of its uses.

    Gradients are summed over data- and context-parallel ranks, not averaged: `finalize_model_grads`
    divides, once. A step is `zero_grad_buffer`, forwards and backwards (all but the last inside
    `no_sync` when the reduction overlaps), `finalize_model_grads`, optimizer step.

    Args:
        config: the model's configuration, kept for schedules to read.
        ddp_config: how gradients are accumulated and reduced.
        module: the model chunk; its parameters become views of flat buffers.
        context: groups; those of `initialize_model_parallel` by default.

    Comm: see `find_replicas`. Every rank of a model-parallel group wraps its chunks together.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        context: ParallelContext | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.context = parallel_context_or_single() if context is None else context
        self.is_last_microbatch = True
        self.param_and_grad_buffers = self._build_buffers()
        # One order on all ranks, whatever order their gradients come in: collectives must match.
        buckets = [b for buffer in self.param_and_grad_buffers for b in buffer.buckets]
        self.buckets = sorted(buckets, key=lambda bucket: -bucket.position)
        self._num_started = 0
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._accumulators = self._register_hooks()
        self.replicas = find_replicas(module, self.context)

    def _build_buffers(self) -> list[ParamAndGradBuffer]:
        by_dtype: dict[torch.dtype, list[tuple[int, nn.Parameter]]] = {}
        for i, param in enumerate(self.module.parameters()):
            if param.requires_grad:
                by_dtype.setdefault(param.dtype, []).append((i, param))
        return [
            ParamAndGradBuffer(
                params,
                self._grad_dtype(dtype),
                self._bucket_size(sum(aligned(param.numel()) for _, param in params)),
                self.context.dp_cp,
            )
            for dtype, params in by_dtype.items()
        ]

    def _grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if not self.ddp_config.grad_reduce_in_fp32:
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def _bucket_size(self, numel: int) -> int | None:
        if not self.ddp_config.overlap_grad_reduce:
            return None
        if self.ddp_config.num_buckets is not None:
            return -(-numel // self.ddp_config.num_buckets)
        # Megatron's default: large enough for full bandwidth, more so with more ranks in the ring.
        return self.ddp_config.bucket_size or max(40_000_000, 1_000_000 * self.context.dp_cp.size)

    def _register_hooks(self) -> list[Any]:
        """Hook the nodes that accumulate gradients, and keep them alive: hooks die with their node.

        Hooks on the node run once per backward after all uses of the parameter, also where every
        use returned None; a tensor hook would not run then in every version of torch.
        """
        accumulators = []
        for bucket in self.buckets:
            for param in bucket.params:
                node = torch.autograd.graph.get_gradient_edge(param).node
                node.register_hook(functools.partial(self._on_gradient, param, bucket))
                accumulators.append(node)
        return accumulators

    def _on_gradient(self, param: nn.Parameter, bucket: Bucket, *_: Any) -> None:
        """Take over a parameter's gradient; in the last microbatch reduce complete buckets."""
        if bucket.is_started:
            raise ScheduleError(
                f"a gradient of {self._names[id(param)]} came after its reduction had started; run "
                "all backwards but a step's last inside no_sync(), call zero_grad_buffer() before "
                "each step, and switch overlap_grad_reduce off if reentrant recomputation uses the "
                "parameter twice"
            )
        if param.grad is not None:
            main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
            main_grad.add_(param.grad)
            param.grad = None
        if self.ddp_config.overlap_grad_reduce and self.is_last_microbatch:
            bucket.mark_ready(param)
            self._start_buckets(only_ready=True)

    def _start_buckets(self, *, only_ready: bool) -> None:
        for bucket in self.buckets[self._num_started :]:
            if only_ready and not bucket.is_ready:
                return
            bucket.start_reduce()
            self._num_started += 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the wrapped module."""
        return self.module(*args, **kwargs)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hand the previous stage's output to the wrapped module."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without starting reductions: for all microbatches of a step but the last."""
        previous, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = previous

    def start_grad_sync(self) -> None:
        """Start the reductions that have not started yet.

        Comm: one all-reduce per bucket, op sum, over dp-cp, in the gradient dtype, not normalised.
        """
        self._start_buckets(only_ready=False)

    def finish_grad_sync(self) -> None:
        """Start what is left, parameters without a gradient included, and wait for all reductions.

        A second call in the same step does nothing.
        """
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.wait()

    def zero_grad_buffer(self) -> None:
        """Set all gradients to zero and begin a step."""
        for bucket in self.buckets:
            bucket.reset()
        for buffer in self.param_and_grad_buffers:
            buffer.zero_grad()
        self._num_started = 0

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a 0-dimensional tensor."""
        for buffer in self.param_and_grad_buffers:
            buffer.scale_grad(factor)

    def broadcast_params(self) -> None:
        """Give every data-parallel rank the parameters of the first.

        Comm: one broadcast over dp-cp per buffer and per parameter that is not trained.
        """
        for buffer in self.param_and_grad_buffers:
            broadcast_(buffer.param_data, self.context.dp_cp)
        for param in self.module.parameters():
            if not param.requires_grad:
                broadcast_(param.data, self.context.dp_cp)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State of the wrapped module, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the wrapped module's state."""
        return self.module.load_state_dict(*args, **kwargs)
