"""Muon: weight matrices of layers move along orthogonalised momentum, all else by Adam."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore.config.optimizer import OptimizerConfig
from mcore.optimizer.adam import Adam
from mcore.optimizer.gradients import Gradients
from mcore.optimizer.newton_schulz import (
    COEFFICIENTS,
    join_rows,
    orthogonalize,
    split_rows,
    update_scale,
)
from mcore.optimizer.param_groups import OptimizedParam, ParamGroup
from mcore.optimizer.whole_matrices import DealtMatrix, batches_of, map_whole_
from mcore.topology.group import Group

STATE_NAME = "momentum_buffer"


class Muon:
    """m = mu m + (1 - mu) g;  p = p (1 - lr wd) - lr k O(m), O the nearest orthogonal matrix.

    With Nesterov's step O is taken of mu m + (1 - mu) g, with the new m. The scale k depends on the
    whole matrix's shape (`update_scale`). O is that of the whole matrix, wherever its elements lie:
    the update is the same at every layout. Rows of queries, keys and values are matrices of their
    own (`muon_split_qkv`).

    Args:
        groups: parameter groups; one of them, marked `is_matrix`, holds the matrices.
        config: learning rate, decay, and Muon's own options.
        matrices: all weight matrices of this rank's chunks, in an order that all ranks share, each
            with what this rank updates of it, or None.
        axes: groups that the matrices are dealt over, outermost first.
        device: where parameters are, also if there are none here.

    Source: Jordan et al. 2024 with the momentum, Nesterov step and decay of torch.optim.Muon.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        config: OptimizerConfig,
        matrices: Sequence[tuple[DealtMatrix, OptimizedParam | None]],
        axes: Sequence[Group],
        device: torch.device,
    ) -> None:
        self._config = config
        self._adam = Adam([group for group in groups if not group["is_matrix"]], config)
        (self._group,) = [group for group in groups if group["is_matrix"]]
        self._axes = tuple(axes)
        self._batches = list(batches_of(matrices, self._axes))
        # Of empty shards too: a checkpoint asks for the state of each.
        self._momenta: dict[Tensor, Tensor] = {
            main: torch.zeros_like(main) for main in self._group["params"]
        }
        mains = list(self._momenta) or [p for group in groups for p in group["params"]]
        dtype = mains[0].dtype if mains else torch.float32
        self._like = torch.empty(0, dtype=dtype, device=device)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Adam's groups, then that of the matrices."""
        return [*self._adam.param_groups, self._group]

    def tensors_of(self, param: Tensor) -> dict[str, Tensor]:
        """Momentum of a matrix, or Adam's moments, by the name that checkpoints use."""
        momentum = self._momenta.get(param)
        return self._adam.tensors_of(param) if momentum is None else {STATE_NAME: momentum}

    def set_step_count(self, value: int) -> None:
        """Go on after so many updates, which only Adam depends on."""
        self._adam.set_step_count(value)

    @torch.no_grad()
    def step_unless(self, skip: Tensor, grads: Gradients) -> None:
        """Update parameters and state, or leave all of them as they are.

        Args:
            skip: one fp32 element on the parameters' device: 1 = leave them.
            grads: a matrix without one has a zero.

        Comm: see `map_whole_`, for each batch of as many matrices as there are ranks.
        """
        self._adam.step_unless(skip, grads)
        skips = skip.bool().reshape(())
        lr, decay = self._group["lr"], self._group["weight_decay"]
        for batch in self._batches:
            directions = [
                (matrix, None if item is None else self._direction(item.main, skips, grads))
                for matrix, item in batch
            ]
            map_whole_(directions, self._update_of, self._axes, self._like)
            for (_, item), (_, update) in zip(batch, directions, strict=True):
                if item is not None:
                    assert update is not None
                    new = item.main * (1.0 - lr * decay) - lr * update
                    item.main.copy_(torch.where(skips, item.main, new))

    def _direction(self, main: Tensor, skips: Tensor, grads: Gradients) -> Tensor:
        """The momentum that is to be orthogonalised, in memory of its own."""
        momentum, mu = self._momenta[main], self._config.muon_momentum
        grad = grads.of(main) if main in grads else torch.zeros_like(main)
        new = torch.lerp(grad, momentum, mu)
        direction = torch.lerp(grad, new, mu) if self._config.muon_nesterov else new.clone()
        momentum.copy_(torch.where(skips, momentum, new))
        return direction.contiguous()

    def _update_of(self, matrix: DealtMatrix, momentum: Tensor) -> Tensor:
        """What a whole matrix moves against, before the learning rate."""
        parts = matrix.sharding.row_parts
        if not parts or not self._config.muon_split_qkv:
            return self._scaled(momentum)
        return join_rows([self._scaled(kind) for kind in split_rows(momentum, parts)], parts)

    def _scaled(self, momentum: Tensor) -> Tensor:
        config = self._config
        coefficients = COEFFICIENTS[config.muon_coefficient_type]
        rows, columns = momentum.shape
        scale = update_scale(rows, columns, config.muon_scale_mode)
        orthogonal = orthogonalize(momentum, config.muon_num_ns_steps, coefficients)
        return orthogonal * (scale * config.muon_extra_scale_factor)
