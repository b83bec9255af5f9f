"""Adam: torch's fused kernels, with state that exists from the start."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore.config.optimizer import OptimizerConfig
from mcore.errors import ConfigError
from mcore.optimizer.param_groups import ParamGroup


class Adam(torch.optim.Adam):
    """Adam with decoupled weight decay (or L2, added to the gradient), one fused kernel per group.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
    p = p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Moments have the dtype of the parameters given here, which are fp32 or better. They are
    allocated at once, so that a checkpoint can be loaded into them before the first step.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    def __init__(self, groups: list[ParamGroup], config: OptimizerConfig) -> None:
        if config.lr is None:
            raise ConfigError("the optimizer needs a learning rate; give lr")
        super().__init__(
            groups,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            decoupled_weight_decay=config.decoupled_weight_decay,
            fused=True,
        )
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        self.found_inf: Tensor | None = None

    def step_unless(self, skip: Tensor) -> None:
        """Update parameters and moments, or leave all of them as they are.

        Args:
            skip: one fp32 element on the parameters' device: 1 = leave them. The kernels read it
                there, so the host does not wait for it.
        """
        self.found_inf = skip
        self.step()

    def tensors_of(self, param: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter, by the name that checkpoints use."""
        state = self.state[param]
        return {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    @property
    def step_count(self) -> int:
        """Updates so far; reads it from the device."""
        for state in self.state.values():
            return int(state["step"])
        return 0

    @step_count.setter
    def step_count(self, value: int) -> None:
        for state in self.state.values():
            state["step"].fill_(value)
