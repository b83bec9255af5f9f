"""Update rules beside Adam, and the choice between them.

Each leaves parameters and state as they are where an update is skipped, without asking the host.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from mcore.config.optimizer import OptimizerConfig
from mcore.errors import ConfigError
from mcore.optimizer.adam import Adam
from mcore.optimizer.gradients import Gradients, elements, runs_of
from mcore.optimizer.param_groups import ParamGroup


class _MomentumRule(torch.optim.Optimizer):
    """A rule with one running tensor per parameter, there before the first step.

    Args:
        groups: parameter groups.
        config: learning rate and decay.
        state_name: the running tensor's name in checkpoints.
    """

    def __init__(self, groups: list[ParamGroup], config: OptimizerConfig, state_name: str) -> None:
        if config.lr is None:
            raise ConfigError("the optimizer needs a learning rate; give lr")
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._name = state_name
        self._is_decoupled = config.decoupled_weight_decay
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {state_name: torch.zeros_like(param)}

    def tensors_of(self, param: Tensor) -> dict[str, Tensor]:
        """The running tensor of a parameter, by the name that checkpoints use."""
        return {self._name: self.state[param][self._name]}

    def set_step_count(self, value: int) -> None:
        """Nothing here depends on it."""

    @torch.no_grad()
    def step_unless(self, skip: Tensor, grads: Gradients) -> None:
        """Update parameters and state, or leave all of them as they are.

        Args:
            skip: one fp32 element on the parameters' device: 1 = leave them.
            grads: parameters without one stay.
        """
        skips = skip.bool().reshape(())
        for group in self.param_groups:
            for param in group["params"]:
                if param not in grads:
                    continue
                running = self.state[param][self._name]
                for run in runs_of(param):
                    grad = grads.of(param, run)
                    self._update(elements(param, run), elements(running, run), grad, group, skips)

    def _update(
        self, param: Tensor, running: Tensor, grad: Tensor, group: ParamGroup, skips: Tensor
    ) -> None:
        decay = group["weight_decay"]
        if not self._is_decoupled:
            grad = grad + decay * param
        direction, new_running = self._rule(grad, running)
        kept = 1.0 - group["lr"] * decay if self._is_decoupled else 1.0
        param.copy_(torch.where(skips, param, param * kept - group["lr"] * direction))
        running.copy_(torch.where(skips, running, new_running))

    @abstractmethod
    def _rule(self, grad: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        """What the parameter moves against, and the new running tensor."""


class Sgd(_MomentumRule):
    """Stochastic gradient descent with momentum: b = mu b + g, p = p - lr b.

    Source: torch's convention, without dampening.
    """

    def __init__(self, groups: list[ParamGroup], config: OptimizerConfig) -> None:
        super().__init__(groups, config, "momentum_buffer")
        self._momentum = config.sgd_momentum

    def _rule(self, grad: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        running = self._momentum * running + grad
        return running, running


class Lion(_MomentumRule):
    """p = p (1 - lr wd) - lr sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g.

    Source: Chen et al. 2023 (arXiv:2302.06675) algorithm 2.
    """

    def __init__(self, groups: list[ParamGroup], config: OptimizerConfig) -> None:
        super().__init__(groups, config, "exp_avg")
        self._betas = config.lion_beta1, config.lion_beta2

    def _rule(self, grad: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        beta1, beta2 = self._betas
        direction = (beta1 * running + (1.0 - beta1) * grad).sign()
        return direction, beta2 * running + (1.0 - beta2) * grad


def build_rule(groups: list[ParamGroup], config: OptimizerConfig) -> Adam | Sgd | Lion:
    """The update rule that the options ask for; Muon, which needs more, is built by itself."""
    if config.optimizer == "sgd":
        return Sgd(groups, config)
    return Lion(groups, config) if config.optimizer == "lion" else Adam(groups, config)
