"""Adam: torch's fused kernels, with state that exists from the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam

from mcore.config.optimizer import OptimizerConfig
from mcore.errors import ConfigError
from mcore.optimizer.gradients import Gradients, at_once, elements, runs_of
from mcore.optimizer.param_groups import ParamGroup

#: Dtypes that moments are narrowed to, by Megatron's names.
_NARROW = {"bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A parameter, or a run of its elements; `is_last` = it completes the parameter."""

    param: Tensor
    run: slice | None
    is_last: bool

    @property
    def numel(self) -> int:
        return self.param.numel() if self.run is None else self.run.stop - self.run.start


def _batches(params: Sequence[Tensor]) -> Iterator[list[_Piece]]:
    """Pieces of parameters with few elements together."""
    batch: list[_Piece] = []
    for param in params:
        runs = list(runs_of(param))
        for number, run in enumerate(runs):
            piece = _Piece(param, run, number == len(runs) - 1)
            total = sum(other.numel for other in batch) + piece.numel
            if batch and total > at_once(total):
                yield batch
                batch = []
            batch.append(piece)
    if batch:
        yield batch


class Adam(torch.optim.Adam):
    """Adam with decoupled weight decay (or L2, added to the gradient), one fused kernel per group.

    m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
    p = p (1 - lr wd) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Moments have the dtype of the parameters given here, which are fp32 or better, or bf16 where
    that is asked for. Moments and gradients in low precision are widened for the update, a few
    parameters at a time, and moments rounded to nearest. Moments are allocated at once, so that a
    checkpoint can be loaded into them before the first step.

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

    @torch.no_grad()
    def step_unless(self, skip: Tensor, grads: Gradients) -> None:
        """Update parameters and moments, or leave all of them as they are.

        Args:
            skip: one fp32 element on the parameters' device: 1 = leave them. The kernels read it
                there, so the host does not wait for it.
            grads: parameters without one stay.
        """
        for group in self.param_groups:
            params = [param for param in group["params"] if param in grads]
            if any(self._dtypes.values()) or any(map(grads.is_narrow, params)):
                for batch in _batches(params):
                    self._update(group, batch, skip, grads)
            elif params:
                self._update(group, [_Piece(p, None, is_last=True) for p in params], skip, grads)

    def _update(
        self, group: ParamGroup, batch: Sequence[_Piece], skip: Tensor, grads: Gradients
    ) -> None:
        """One call of the kernel, on copies of what is not in the parameters' dtype."""
        states = [self.state[piece.param] for piece in batch]
        moments = {
            name: [elements(s[name], piece.run) for s, piece in zip(states, batch, strict=True)]
            for name in self._dtypes
        }
        wide = {
            name: [m.to(piece.param.dtype) for m, piece in zip(narrow, batch, strict=True)]
            for name, narrow in moments.items()
        }
        adam(
            [elements(piece.param, piece.run) for piece in batch],
            [grads.of(piece.param, piece.run) for piece in batch],
            wide["exp_avg"],
            wide["exp_avg_sq"],
            [],
            # The kernel counts the step: for each parameter once.
            [
                state["step"] if piece.is_last else state["step"].clone()
                for state, piece in zip(states, batch, strict=True)
            ],
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
        for name, dtype in self._dtypes.items():
            if dtype is not None:
                torch._foreach_copy_(moments[name], wide[name])

    def tensors_of(self, param: Tensor) -> dict[str, Tensor]:
        """The moments of a parameter, by the name that checkpoints use."""
        state = self.state[param]
        return {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def set_step_count(self, value: int) -> None:
        """Go on after so many updates; the corrections of both means depend on it."""
        for state in self.state.values():
            state["step"].fill_(value)
