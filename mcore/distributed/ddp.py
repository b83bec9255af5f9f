"""Data parallelism over flat buffers: every rank computes with the whole model chunk.

Optimizer state (ZeRO-1) and gradients (ZeRO-2) may be dealt to the ranks; parameters are whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed.bucket import Bucket, ShardedBucket
from mcore.distributed.data_parallel import DataParallelModule, ParamPart
from mcore.distributed.param_and_grad_buffer import ParamAndGradBuffer, aligned
from mcore.distributed.param_units import param_units
from mcore.distributed.replicas import find_replicas
from mcore.distributed.sharding_groups import ShardingGroups, build_sharding_groups
from mcore.distributed.unit_agreement import grad_tensors
from mcore.errors import ScheduleError
from mcore.parallel_state import parallel_context_or_single
from mcore.topology.collectives import broadcast_
from mcore.topology.context import ParallelContext
from mcore.topology.flat_range import FlatRange
from mcore.topology.param_sharding import global_named_parameters, sharding_of


class DistributedDataParallel(DataParallelModule):
    """A model chunk whose gradients are accumulated in flat buffers and reduced bucket by bucket.

    Without sharding and with ZeRO-1 each trained parameter gets `main_grad`, its view of the
    gradient buffer. Autograd's gradient of every backward is added to it and freed. An operation
    may also add its parameter gradient to `main_grad` itself and return None for it; the parameter
    counts as complete all the same, once autograd has visited each of its uses. With ZeRO-2 there
    is no `main_grad`, and every microbatch is reduced into this rank's shard, at the end of its
    backward at the latest. A parameter without a gradient, on some ranks or all, counts as zero.

    Gradients are summed over data- and context-parallel ranks, not averaged: `finalize_model_grads`
    divides, once. A step is `zero_grad_buffer`, forwards and backwards (all but the last inside
    `no_sync` when the reduction overlaps), `finalize_model_grads`, optimizer step.

    Args:
        config: the model's configuration, kept for schedules to read.
        ddp_config: how gradients are accumulated and reduced.
        module: the model chunk; its parameters become views of flat buffers.
        context: groups; those of `initialize_model_parallel` by default.
        groups: which data-parallel ranks share what; made from `ddp_config` by default.

    Comm: see `find_replicas`. Every rank of a model-parallel group wraps its chunks together.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        *,
        context: ParallelContext | None = None,
        groups: ShardingGroups | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.context = parallel_context_or_single() if context is None else context
        self.groups = groups or build_sharding_groups(
            self.context, ddp_config.num_distributed_optimizer_instances
        )
        self.is_last_microbatch = True
        self.replicas = find_replicas(module, self.context)
        self.param_and_grad_buffers = self._build_buffers()
        # One order on all ranks, whatever order their gradients come in: collectives must match.
        buckets = [b for buffer in self.param_and_grad_buffers for b in buffer.buckets]
        self.buckets: list[Bucket] = sorted(buckets, key=lambda bucket: -bucket.position)
        self._bucket_of = {id(param): b for b in self.buckets for param in b.params}
        self._streams = any(bucket.streams for bucket in self.buckets)
        self._num_started = 0
        self._round_is_open = False  # a streamed microbatch has gradients that are not reduced
        self._in_backward = False  # a streamed microbatch is to be reduced when its backward ends
        self._is_reduced = False  # and it has been, since that backward began
        self._names = {id(param): name for name, param in module.named_parameters()}
        self._accumulators = self._register_hooks()
        if ddp_config.overlap_param_gather:
            self._register_param_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the wrapped module."""
        output = super().forward(*args, **kwargs)
        if self._streams and torch.is_grad_enabled():
            for tensor in grad_tensors(output):
                tensor.register_hook(self._on_backward)
        return output

    def _on_backward(self, _: Tensor) -> None:
        """Reduce the microbatch once its backward is over, whatever this rank made use of."""
        if not self._in_backward:
            self._in_backward, self._is_reduced = True, False
            # Of the backward that reached the output, not of one that recomputes inside it.
            Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._in_backward = False
        if self._round_is_open or not self._is_reduced:
            self._start_buckets(only_ready=False)

    def _build_buffers(self) -> list[ParamAndGradBuffer]:
        by_dtype: dict[torch.dtype, list[tuple[int, nn.Parameter]]] = {}
        tied = {
            id(param)
            for name, param in global_named_parameters(self.module)
            # The mark is Megatron's: where a rank has several chunks, the one with the embedding
            # knows nothing of the copy in another.
            if name in self.replicas.tied_keys or param.__dict__.get("shared_embedding", False)
        }
        alone = set()
        for i, param in enumerate(self.module.parameters()):
            if param.requires_grad:
                by_dtype.setdefault(param.dtype, []).append((i, param))
                if id(param) in tied:
                    alone.add(i)
        stage = self.ddp_config.sharding_stage
        return [
            ParamAndGradBuffer(
                params,
                self._grad_dtype(dtype),
                self._bucket_size(sum(aligned(param.numel()) for _, param in params)),
                self.groups,
                stage=stage,
                # Copies on other stages are summed shard by shard, so they are dealt alike.
                alone=alone if stage else (),
            )
            for dtype, params in by_dtype.items()
        ]

    def _grad_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if not self.ddp_config.keeps_grads_wide:
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def _bucket_size(self, numel: int) -> int | None:
        options = self.ddp_config
        streams = options.sharding_stage == 2
        if not (options.overlap_grad_reduce or options.overlap_param_gather or streams):
            return None
        if options.num_buckets is not None:
            return -(-numel // options.num_buckets)
        # Megatron's default: large enough for full bandwidth, more so with more ranks in the ring.
        return options.bucket_size or max(40_000_000, 1_000_000 * self.context.dp_cp.size)

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
        """Take over a parameter's gradient; reduce complete buckets where that is due."""
        if bucket.is_started:
            self._on_late_gradient(param)
        if param.grad is not None:
            bucket.accumulate(param, param.grad)
            param.grad = None
        if self._streams:
            self._round_is_open = True
            bucket.mark_ready(param)
            self._start_buckets(only_ready=True)
        elif self.ddp_config.overlap_grad_reduce and self.is_last_microbatch:
            bucket.mark_ready(param)
            self._start_buckets(only_ready=True)

    def _on_late_gradient(self, param: nn.Parameter) -> None:
        if self._streams:
            self._finish_round()
            return
        raise ScheduleError(
            f"a gradient of {self._names[id(param)]} came after its reduction had started; run "
            "all backwards but a step's last inside no_sync(), call zero_grad_buffer() before "
            "each step, and switch overlap_grad_reduce off if reentrant recomputation uses the "
            "parameter twice"
        )

    def _start_buckets(self, *, only_ready: bool) -> None:
        for bucket in self.buckets[self._num_started :]:
            if only_ready and not bucket.is_ready:
                return
            bucket.start_reduce()
            self._num_started += 1
            if self._streams:
                # At most one reduction stays under way: its buffer is what ZeRO-2 saves.
                behind = 1 if self.ddp_config.overlap_grad_reduce else 0
                for earlier in self.buckets[: self._num_started - behind]:
                    earlier.wait()
        if self._streams and self._num_started == len(self.buckets):
            self._end_round()

    def _finish_round(self) -> None:
        """Reduce what is left of a streamed microbatch: parameters without gradients included.

        All ranks come here alike: a round is opened by gradients, which all data-parallel ranks get
        in the same microbatches.
        """
        if self._round_is_open:
            self._start_buckets(only_ready=False)

    def _end_round(self) -> None:
        self._round_is_open, self._is_reduced = False, True
        self._num_started = 0
        for bucket in self.buckets:
            bucket.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without starting reductions: for all microbatches of a step but the last.

        With ZeRO-2 each microbatch is reduced all the same, at the end of its backward; where the
        wrapper's own forward was passed by, at the end of this block.
        """
        previous, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
            if self._streams:
                self._finish_round()
        finally:
            self.is_last_microbatch = previous

    def start_grad_sync(self) -> None:
        """Start the reductions that have not started yet.

        Comm: see the buckets' `start_reduce`.
        """
        if self._streams:
            self._finish_round()
        else:
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
        self._round_is_open = self._in_backward = False

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a 0-dimensional tensor."""
        for buffer in self.param_and_grad_buffers:
            buffer.scale_grad(factor)

    def _register_param_hooks(self) -> None:
        """Wait for a part of the model's parameters right before its forward."""
        for module, params in param_units(self.module):
            buckets = {id(b): b for p in params if (b := self._bucket_of.get(id(p))) is not None}
            sharded = [b for b in buckets.values() if isinstance(b, ShardedBucket)]
            module.register_forward_pre_hook(functools.partial(_wait_for_params, sharded))

    def start_param_sync(self) -> None:
        """Start collecting the parameters that other ranks updated, first layers first.

        Without `overlap_param_gather` it waits for them.

        Comm: one all-gather per bucket over the ranks that share the optimizer state.
        """
        for bucket in reversed(self.buckets):
            if isinstance(bucket, ShardedBucket):
                bucket.start_param_gather()
        if not self.ddp_config.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are complete."""
        _wait_for_params([b for b in self.buckets if isinstance(b, ShardedBucket)])

    def own_parts(self) -> Iterator[ParamPart]:
        """What this rank updates of each trained parameter; parameters without any are left out."""
        for name, param in global_named_parameters(self.module):
            bucket = self._bucket_of.get(id(param))
            if bucket is None:
                continue
            start, numel = bucket.run_of(param)
            if numel or not isinstance(bucket, ShardedBucket):
                yield ParamPart(
                    name,
                    param,
                    sharding_of(param, self.context.tp),
                    FlatRange(tuple(param.shape), start, numel),
                    bucket.own_data(param),
                    param.dtype,
                )

    def held_parts(self) -> Iterator[ParamPart]:
        """All parameters, whole; those under way are waited for."""
        self.finish_param_sync()
        for name, param in global_named_parameters(self.module):
            sharding = sharding_of(param, self.context.tp)
            run = FlatRange.whole(param)
            yield ParamPart(name, param, sharding, run, param.detach(), param.dtype)

    def held_gradients(self) -> Iterator[Tensor]:
        """The gradient of every bucket, or this rank's shard of it."""
        for bucket in self.buckets:
            yield bucket.grad_data

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global names and parameters."""
        for name, param in global_named_parameters(self.module):
            if id(param) in self._bucket_of:
                yield name, param

    def own_grad(self, param: nn.Parameter) -> Tensor:
        """The reduced gradient of this rank's part of a parameter."""
        return self._bucket_of[id(param)].own_grad(param)

    def broadcast_params(self) -> None:
        """Give every data-parallel rank the parameters of the first.

        Comm: one broadcast over dp-cp per buffer and per parameter that is not trained.
        """
        self.finish_param_sync()
        for buffer in self.param_and_grad_buffers:
            broadcast_(buffer.param_data, self.context.dp_cp)
        for param in self.module.parameters():
            if not param.requires_grad:
                broadcast_(param.data, self.context.dp_cp)


def _wait_for_params(buckets: list[ShardedBucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.wait_for_params()
