"""Adam: torch's fused kernels, with state that exists from the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam

from mcore.config.optimizer import OptimizerConfig
from mcore.errors import ConfigError
from mcore.optimizer.param_groups import ParamGroup

#: Dtypes that moments are narrowed to, by Megatron's names.
_NARROW = {"bf16": torch.bfloat16}

#: Elements whose moments are widened at a time: 32 MB each in fp32.
_BATCH_ELEMENTS = 8 * 2**20


def _batches(params: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters with few elements together, or one large parameter."""
    batch: list[Tensor] = []
    for param in params:
        if batch and sum(p.numel() for p in batch) + param.numel() > _BATCH_ELEMENTS:
            yield batch
            batch = []
        batch.append(param)
    if batch:
        yield batch


class Adam(torch.optim.Adam):
    """Adam with decoupled weight decay (or L2, added to the gradient), one fused kernel per group.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
    p = p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Moments have the dtype of the parameters given here, which are fp32 or better, or bf16 where
    that is asked for: then they are widened for the update, a few parameters at a time, and rounded
    to nearest. They are allocated at once, so that a checkpoint can be loaded into them before the
    first step.

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
        self._dtypes = {
            "exp_avg": _NARROW.get(config.exp_avg_dtype),
            "exp_avg_sq": _NARROW.get(config.exp_avg_sq_dtype),
        }
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {
                    "step": torch.zeros((), dtype=torch.float32, device=param.device),
                    **{
                        name: torch.zeros_like(param, dtype=dtype or param.dtype)
                        for name, dtype in self._dtypes.items()
                    },
                }
        self.found_inf: Tensor | None = None

    def step_unless(self, skip: Tensor) -> None:
        """Update parameters and moments, or leave all of them as they are.

        Args:
            skip: one fp32 element on the parameters' device: 1 = leave them. The kernels read it
                there, so the host does not wait for it.
        """
        if any(self._dtypes.values()):
            self._step_widened(skip)
            return
        self.found_inf = skip
        self.step()

    @torch.no_grad()
    def _step_widened(self, skip: Tensor) -> None:
        """The same kernels on copies of the moments in the parameters' dtype."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for batch in _batches(params):
                states = [self.state[param] for param in batch]
                first, second = (
                    [state[name].to(p.dtype) for state, p in zip(states, batch, strict=True)]
                    for name in ("exp_avg", "exp_avg_sq")
                )
                adam(
                    batch,
                    [param.grad for param in batch if param.grad is not None],
                    first,
                    second,
                    [],
                    [state["step"] for state in states],
                    fused=True,
                    found_inf=skip,
                    decoupled_weight_decay=group["decoupled_weight_decay"],
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                for name, new in (("exp_avg", first), ("exp_avg_sq", second)):
                    torch._foreach_copy_([state[name] for state in states], new)

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
