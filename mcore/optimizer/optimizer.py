"""From finished gradients to new parameters: norm, clipping, update, copy back to low precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from mcore.config.optimizer import OptimizerConfig
from mcore.device import current_device
from mcore.distributed import DataParallelModule, ParamPart, share_tied_parameters
from mcore.errors import ConfigError
from mcore.optimizer.adam import Adam
from mcore.optimizer.clip_grads import clip_factor, get_grad_norm
from mcore.optimizer.grad_scaler import build_grad_scaler
from mcore.optimizer.gradients import Gradients
from mcore.optimizer.muon import Muon
from mcore.optimizer.offload import OffloadedRule
from mcore.optimizer.param_groups import (
    ParamGroup,
    build_param_groups,
    collect_matrices,
    collect_params,
)
from mcore.optimizer.rules import Lion, Sgd, build_rule
from mcore.parallel_state import parallel_context_or_single
from mcore.topology.collectives import all_reduce_
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group

Rule: TypeAlias = Adam | Sgd | Lion | Muon | OffloadedRule

#: From the global norm before clipping, 0-dim fp64, to a 0-dim bool, equal on all ranks: leave the
#: update out.
Veto: TypeAlias = Callable[[Tensor], Tensor]

#: From the name of a part of the step to its context.
Phase: TypeAlias = Callable[[str], AbstractContextManager[None]]


def _untimed(name: str) -> AbstractContextManager[None]:
    del name
    return nullcontext()


class StepResult(NamedTuple):
    """What a step did. Tensors stay on their device; reading one on CUDA waits for it.

    Attributes:
        update_successful: 0-dim bool: False where a gradient was not finite, or the update was
            vetoed. Parameters and moments are then bit-unchanged, on all ranks.
        grad_norm: global L2 norm before clipping, 0-dim fp64, equal on all ranks.
        num_zeros_in_grad: number of zero elements of the gradient, 0-dim fp64, or None where not
            counted (`log_num_zeros_in_grad`).
        params_norm: L2 norm of the parameters after the update, 0-dim fp64, or None where not
            measured (`log_params_norm`).
    """

    update_successful: Tensor
    grad_norm: Tensor
    num_zeros_in_grad: Tensor | None = None
    params_norm: Tensor | None = None


class MegatronOptimizer:
    """The update rule over this rank's parameters, with fp32 main parameters for bf16 and fp16.

    Gradients come from the data-parallel wrapper where the chunks are wrapped, else from `grad`.

    Args:
        config: update rule and clipping.
        model_chunks: this rank's model chunks.
        context: groups.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[nn.Module],
        context: ParallelContext,
    ) -> None:
        self.config = config
        self.context = context
        self.params = collect_params(model_chunks, context, config)
        devices = (param.device for chunk in model_chunks for param in chunk.parameters())
        self._device = next(devices, current_device())  # a pipeline stage may have no parameters
        self.optimizer = self._build_rule(model_chunks)
        self.grad_scaler = build_grad_scaler(config, self._device)
        self._norm_groups: tuple[Group, ...] = (context.mp,)
        self._num_updates = torch.zeros((), dtype=torch.int64, device=self._device)

    def _build_rule(self, model_chunks: Sequence[nn.Module]) -> Rule:
        groups = build_param_groups(self.params, self.config)
        if any(item.is_offloaded for item in self.params):
            build = partial(build_rule, config=self.config)
            return OffloadedRule(groups, self.params, build, self._device)
        if self.config.optimizer != "muon":
            return build_rule(groups, self.config)
        matrices = collect_matrices(model_chunks, self.params, self.context)
        axes = (*self._shard_axes(model_chunks), self.context.tp)
        return Muon(groups, self.config, matrices, axes, self._device)

    def _shard_axes(self, model_chunks: Sequence[nn.Module]) -> tuple[Group, ...]:  # noqa: ARG002
        """Data-parallel ranks that this rank shares its parameters' state with."""
        return ()

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of main parameters, whose `lr` and `weight_decay` the scheduler writes."""
        return self.optimizer.param_groups

    @property
    def step_count(self) -> int:
        """Updates so far, those of a checkpoint included; reads it from the device."""
        return int(self._num_updates)

    @step_count.setter
    def step_count(self, value: int) -> None:
        self._num_updates.fill_(value)
        self.optimizer.set_step_count(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' `grad`; a wrapped chunk's `zero_grad_buffer` clears the others."""
        for item in self.params:
            if set_to_none or item.param.grad is None:
                item.param.grad = None
            else:
                item.param.grad.zero_()

    def get_loss_scale(self) -> Tensor:
        """What the loss is multiplied by before backward, [1]."""
        return self.grad_scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to run backward on."""
        if not self._is_scaled:
            return loss
        return loss * self.grad_scaler.scale.to(loss.dtype).reshape(loss.shape)

    @property
    def _is_scaled(self) -> bool:
        return self.config.fp16 or self.config.loss_scale is not None

    @torch.no_grad()
    def step(self, veto: Veto | None = None, phase: Phase = _untimed) -> StepResult:
        """Measure the gradient, clip it and update the parameters; nothing waits for the device.

        An update with a gradient that is not finite, on any rank, is left out on all ranks.

        Args:
            veto: may leave the update out for another reason.
            phase: context of a part of the step, by Megatron's names.

        Comm: the norm's all-reduces, see `get_grad_norm`; as many again for each other watcher.
        """
        grads = Gradients()
        pieces: list[Tensor] = []
        with phase("optimizer-copy-to-main-grad"):
            for item in self.params:
                grad = item.read_gradient()
                if grad is not None:
                    grads.add(item.main, grad)
                    pieces += item.counted(grad)
        with phase("optimizer-unscale-and-check-inf"):
            scaled_norm = get_grad_norm(pieces, self._norm_groups, self._device)
            is_finite = torch.isfinite(scaled_norm)
        zeros = None
        if self.config.log_num_zeros_in_grad:
            with phase("optimizer-count-zeros"):
                zeros = self._count_zeros(pieces)
        with phase("optimizer-clip-main-grad"):
            grad_norm = self._unscale_and_clip_(grads, scaled_norm)
        applies = is_finite if veto is None else is_finite & ~veto(grad_norm)
        with phase("optimizer-inner-step"):
            self.optimizer.step_unless((~applies).float(), grads)
        self._num_updates += applies
        self.grad_scaler.update(~is_finite)
        with phase("optimizer-copy-main-to-model-params"):
            self._copy_main_params_to_model_params()
        params_norm = self._params_norm() if self.config.log_params_norm else None
        return StepResult(applies, grad_norm, zeros, params_norm)

    def _count_zeros(self, pieces: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for piece in pieces:
            total += (piece == 0).sum()
        for group in self._norm_groups:
            all_reduce_(total, group)
        return total

    def _params_norm(self) -> Tensor:
        # One at a time: those in host memory come to the device for the sum only.
        mains = ((item, item.main.detach().to(self._device)) for item in self.params)
        pieces = (view for item, main in mains for view in item.counted(main))
        return get_grad_norm(pieces, self._norm_groups, self._device)

    def _unscale_and_clip_(self, grads: Gradients, scaled_norm: Tensor) -> Tensor:
        """Bring gradients to their own scale and below the limit in one pass; their norm before."""
        inverse = None
        norm = scaled_norm
        if self._is_scaled:
            inverse = 1.0 / self.grad_scaler.scale.double().reshape(())
            norm = scaled_norm * inverse
        factor = clip_factor(self.config.clip_grad, norm, inverse)
        if factor is not None:
            grads.scale_(factor)
        return norm

    def reload_model_params(self) -> None:
        """Take main parameters anew from the model, after weights were loaded without them."""
        with torch.no_grad():
            for item in self.params:
                if item.is_copied:
                    item.main.copy_(item.part.data)

    def refresh_host_copies(self) -> None:
        """Make host and device agree again, after a checkpoint was read.

        Of parameters with a main parameter of their own the checkpoint had that, and the model
        takes it: of ZeRO-3's shards, which are as precise, nothing else was read. Of others it had
        the model's.
        """
        with torch.no_grad():
            for item in self.params:
                if item.is_offloaded and item.has_main_param:
                    item.part.data.copy_(item.main)
                elif item.is_offloaded:
                    item.main.copy_(item.part.data)

    def named_states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Tensor]]]:
        """State per parameter, to read and to write in place.

        Yields:
            Global name, parameter, and the rule's state (`exp_avg` and `exp_avg_sq` of Adam) with,
            for a parameter in low precision, `main_param`: tensors of the parameter's local shape
            (1-D runs of it where the state is sharded), there before any step.
        """
        for part, tensors in self.state_parts():
            yield part.name, part.param, tensors

    def state_parts(self) -> Iterator[tuple[ParamPart, dict[str, Tensor]]]:
        """The same with the run of the parameter that the tensors belong to, for checkpoints."""
        for item in self.params:
            tensors = dict(self.optimizer.tensors_of(item.main))
            if item.has_main_param:
                tensors["main_param"] = item.main.detach()
            yield item.part, tensors

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer holds beside the model.

        Yields:
            `main_parameters`, `moments`, or `gradients` for those that arrive in host memory, and a
            tensor.
        """
        for item in self.params:
            if item.is_copied:
                yield "main_parameters", item.main.detach()
            yield from (
                ("moments", state) for state in self.optimizer.tensors_of(item.main).values()
            )
        if isinstance(self.optimizer, OffloadedRule):
            yield from (("gradients", place) for place in self.optimizer.places())

    def _copy_main_params_to_model_params(self) -> None:
        copied = (item for item in self.params if item.is_copied and not item.is_offloaded)
        pairs = [(item.part.data, item.main) for item in copied]
        if pairs:
            torch._foreach_copy_([data for data, _ in pairs], [main for _, main in pairs])


class DistributedOptimizer(MegatronOptimizer):
    """An optimizer whose state is dealt to data-parallel ranks (ZeRO-1 to 3).

    Each rank updates its run of the parameters. With ZeRO-1 and 2 the updated runs are then
    collected; with ZeRO-3 the next forward does that.

    Args:
        config: update rule and clipping.
        model_chunks: this rank's model chunks, wrapped with the same sharding strategy.
        context: groups.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DataParallelModule],
        context: ParallelContext,
    ) -> None:
        self._chunks = list(model_chunks)
        super().__init__(config, model_chunks, context)
        self._norm_groups = (self._chunks[0].groups.shard, context.mp)

    def _shard_axes(self, model_chunks: Sequence[nn.Module]) -> tuple[Group, ...]:  # noqa: ARG002
        return (self._chunks[0].groups.shard,)

    def step(self, veto: Veto | None = None, phase: Phase = _untimed) -> StepResult:
        """Update this rank's run of the parameters and collect what the other ranks updated.

        Args:
            veto: see `MegatronOptimizer.step`.
            phase: likewise.

        Comm: the norm's all-reduces over the shard, then tensor- and pipeline-parallel ranks; one
            all-gather a bucket (see `start_param_sync`).
        """
        result = super().step(veto, phase)
        with phase("params-all-gather"):
            for chunk in self._chunks:
                chunk.start_param_sync()
        return result


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    *,
    context: ParallelContext | None = None,
) -> MegatronOptimizer:
    """The optimizer of this rank's model chunks; copies of tied parameters become equal.

    Args:
        config: update rule and clipping.
        model_chunks: all chunks of this rank, in a data-parallel wrapper, or plain modules.
        context: groups; by default those of the first wrapped chunk, or of
            `initialize_model_parallel`.

    Comm: see `share_tied_parameters`; every rank has to call it.

    Raises:
        ConfigError: chunks are wrapped with different sharding strategies.
    """
    wrapped = [chunk for chunk in model_chunks if isinstance(chunk, DataParallelModule)]
    if context is None:
        context = wrapped[0].context if wrapped else parallel_context_or_single()
    stages = {chunk.ddp_config.sharding_stage for chunk in wrapped}
    if len(stages) > 1:
        raise ConfigError(f"model chunks are wrapped for different ZeRO stages: {sorted(stages)}")
    share_tied_parameters(wrapped, context)
    if stages - {0}:
        return DistributedOptimizer(config, wrapped, context)
    return MegatronOptimizer(config, model_chunks, context)
