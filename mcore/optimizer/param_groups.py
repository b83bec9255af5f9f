"""Which parameters an optimizer updates together, and with what precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore.config.optimizer import OptimizerConfig
from mcore.topology.context import ParallelContext
from mcore.topology.param_sharding import ParamSharding, global_named_parameters, sharding_of

ParamGroup = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizedParam:
    """A parameter and what the update rule works on.

    Attributes:
        name: global name, the same at every layout.
        param: the model's parameter.
        main: the fp32 copy that is updated for a parameter in lower precision, else `param` itself.
        sharding: how the parameter is cut over tensor-parallel ranks.
    """

    name: str
    param: nn.Parameter
    main: nn.Parameter
    sharding: ParamSharding

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies: not to biases and parameters that are 1-D as a whole."""
        is_bias = self.name == "bias" or self.name.endswith(".bias")
        return len(self.sharding.global_shape) > 1 and not is_bias

    def gradient(self) -> Tensor | None:
        """Gradient in the precision of `main`: from the data-parallel buffer, or autograd's."""
        grad = self.param.__dict__.get("main_grad", self.param.grad)
        return None if grad is None else grad.to(self.main.dtype)


def collect_params(
    model_chunks: Sequence[nn.Module], context: ParallelContext
) -> list[OptimizedParam]:
    """The trained parameters of this rank, with main parameters where they need them."""
    return [
        OptimizedParam(name, param, _main_param(param), sharding_of(param, context.tp))
        for chunk in model_chunks
        for name, param in global_named_parameters(chunk)
        if param.requires_grad
    ]


def build_param_groups(
    params: Sequence[OptimizedParam], config: OptimizerConfig
) -> list[ParamGroup]:
    """A group with weight decay and one without, also where a pipeline stage leaves one empty.

    Groups carry no `max_lr` and `min_lr`, unlike Megatron's: the scheduler has them, and a second
    copy would win over it when the schedule is changed.
    """
    return [
        {
            "params": [p.main for p in params if p.is_decayed == is_decayed],
            "lr": config.lr,
            "weight_decay": config.weight_decay * wd_mult,
            "lr_mult": 1.0,
            "wd_mult": wd_mult,
        }
        for is_decayed, wd_mult in ((True, 1.0), (False, 0.0))
    ]


def _main_param(param: nn.Parameter) -> nn.Parameter:
    if torch.promote_types(param.dtype, torch.float32) == param.dtype:
        return param
    return nn.Parameter(param.detach().float())
