"""From finished gradients to new parameters: norm, clipping, update, copy back to low precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mcore.config.optimizer import OptimizerConfig
from mcore.distributed import DistributedDataParallel
from mcore.optimizer.adam import Adam
from mcore.optimizer.clip_grads import clip_grad_by_total_norm_, get_grad_norm
from mcore.optimizer.param_groups import ParamGroup, build_param_groups, collect_params
from mcore.parallel_state import parallel_context_or_single
from mcore.topology.context import ParallelContext


class StepResult(NamedTuple):
    """What a step did. Tensors stay on their device; reading one on CUDA waits for it.

    Attributes:
        update_successful: 0-dim bool: False where a gradient was not finite. Parameters and moments
            are then bit-unchanged, on all ranks.
        grad_norm: global L2 norm before clipping, 0-dim fp64, equal on all ranks.
        num_zeros_in_grad: number of zero gradients, or None where not counted.
    """

    update_successful: Tensor
    grad_norm: Tensor
    num_zeros_in_grad: Tensor | None


class MegatronOptimizer:
    """AdamW over this rank's parameters, with fp32 main parameters for those in bf16 or fp16.

    Gradients come from `main_grad` where the chunks are wrapped in `DistributedDataParallel`, else
    from `grad`.

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
        self.params = collect_params(model_chunks, context)
        self.optimizer = Adam(build_param_groups(self.params, config), config)
        devices = [param.device for chunk in model_chunks for param in chunk.parameters()]
        self._device = devices[0] if devices else torch.device("cpu")

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Groups of main parameters, whose `lr` and `weight_decay` the scheduler writes."""
        return self.optimizer.param_groups

    @property
    def step_count(self) -> int:
        """Updates so far, those of a checkpoint included."""
        return self.optimizer.step_count

    @step_count.setter
    def step_count(self, value: int) -> None:
        self.optimizer.step_count = value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the parameters' `grad`; a wrapped chunk's `zero_grad_buffer` clears `main_grad`."""
        for item in self.params:
            if set_to_none or item.param.grad is None:
                item.param.grad = None
            else:
                item.param.grad.zero_()

    def get_loss_scale(self) -> Tensor:
        """What the loss is multiplied by before backward: 1, [1]."""
        return torch.ones(1, device=self._device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to run backward on."""
        return loss

    @torch.no_grad()
    def step(self) -> StepResult:
        """Measure the gradient, clip it and update the parameters; nothing waits for the device.

        Comm: the norm's all-reduce over tensor- and pipeline-parallel ranks, see `get_grad_norm`.
        """
        grads = []
        pieces = []
        for item in self.params:
            grad = item.gradient()
            item.main.grad = grad
            if grad is not None:
                grads.append(grad)
                pieces += item.sharding.owned(grad)
        grad_norm = get_grad_norm(pieces, self.context.mp, self._device)
        is_finite = torch.isfinite(grad_norm)
        if self.config.clip_grad > 0:
            clip_grad_by_total_norm_(grads, self.config.clip_grad, grad_norm)
        self.optimizer.step_unless(skip=(~is_finite).float())
        for item in self.params:
            item.main.grad = None
        self._copy_main_params_to_model_params()
        return StepResult(is_finite, grad_norm, None)

    def reload_model_params(self) -> None:
        """Take main parameters anew from the model, after weights were loaded without them."""
        with torch.no_grad():
            for item in self.params:
                if item.main is not item.param:
                    item.main.copy_(item.param)

    def named_states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Tensor]]]:
        """State per parameter, for checkpoints to read and to write in place.

        Yields:
            Global name, parameter, and `exp_avg`, `exp_avg_sq` and, for a parameter in low
            precision, `main_param`: tensors of the parameter's local shape, there before any step.
        """
        for item in self.params:
            state = self.optimizer.state[item.main]
            tensors = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if item.main is not item.param:
                tensors["main_param"] = item.main.detach()
            yield item.name, item.param, tensors

    def _copy_main_params_to_model_params(self) -> None:
        pairs = [(p.param, p.main) for p in self.params if p.main is not p.param]
        if pairs:
            torch._foreach_copy_([param for param, _ in pairs], [main for _, main in pairs])


def get_megatron_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    *,
    context: ParallelContext | None = None,
) -> MegatronOptimizer:
    """The optimizer of this rank's model chunks.

    Args:
        config: update rule and clipping.
        model_chunks: chunks wrapped in `DistributedDataParallel`, or plain modules.
        context: groups; by default those of the first wrapped chunk, or of
            `initialize_model_parallel`.
    """
    for chunk in model_chunks:
        if context is None and isinstance(chunk, DistributedDataParallel):
            context = chunk.context
    return MegatronOptimizer(config, model_chunks, context or parallel_context_or_single())
