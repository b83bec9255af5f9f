"""What every data-parallel wrapper offers to schedules, finalisation, optimizers, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.distributed.replicas import Replicas
from mcore.distributed.sharding_groups import ShardingGroups
from mcore.topology.context import ParallelContext
from mcore.topology.flat_range import FlatRange
from mcore.topology.param_sharding import ParamSharding


@dataclass(frozen=True, slots=True)
class ParamPart:
    """A parameter and the run of its elements that this rank holds or updates.

    Attributes:
        name: global name, the same at every layout.
        param: the parameter.
        sharding: how it is cut over tensor-parallel ranks.
        run: which elements of this rank's tensor-parallel part.
        data: these elements, live; shaped as the parameter where the run is whole, else 1-D.
        compute_dtype: what the model computes with; `data` may be wider.
    """

    name: str
    param: nn.Parameter
    sharding: ParamSharding
    run: FlatRange
    data: Tensor
    compute_dtype: torch.dtype


class DataParallelModule(nn.Module):
    """A model chunk whose gradients are summed over data-parallel ranks.

    Gradients are summed, not averaged: `finalize_model_grads` divides, once.

    Attributes:
        config: the model's configuration, kept for schedules to read.
        ddp_config: how gradients are accumulated, reduced and sharded.
        module: the model chunk.
        context: groups.
        groups: which data-parallel ranks share what.
        replicas: parameters with copies or partial gradients on other ranks than those.
    """

    config: Any
    ddp_config: DistributedDataParallelConfig
    module: nn.Module
    context: ParallelContext
    groups: ShardingGroups
    replicas: Replicas

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the wrapped module."""
        return self.module(*args, **kwargs)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Hand the previous stage's output to the wrapped module."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Run all microbatches of a step but the last in it: their reductions can wait."""

    @abstractmethod
    def start_grad_sync(self) -> None:
        """Start the reductions that have not started yet."""

    @abstractmethod
    def finish_grad_sync(self) -> None:
        """Finish all reductions; a second call in the same step does nothing."""

    @abstractmethod
    def start_param_sync(self) -> None:
        """Bring updated parameters to every rank that computes with them."""

    @abstractmethod
    def finish_param_sync(self) -> None:
        """Wait until parameters are complete."""

    @abstractmethod
    def zero_grad_buffer(self) -> None:
        """Set all gradients to zero and begin a step."""

    @abstractmethod
    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a 0-dimensional tensor."""

    @abstractmethod
    def own_parts(self) -> Iterator[ParamPart]:
        """What this rank updates of each trained parameter; the whole of it without sharding."""

    @abstractmethod
    def held_parts(self) -> Iterator[ParamPart]:
        """What this rank holds of each parameter between steps; for checkpoints and reports."""

    @abstractmethod
    def held_gradients(self) -> Iterator[Tensor]:
        """The accumulated gradients that this rank holds after a step, padding included."""

    @abstractmethod
    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global names and parameters, whether or not this rank updates a part of them."""

    @abstractmethod
    def own_grad(self, param: nn.Parameter) -> Tensor:
        """The gradient of the part that this rank updates, reduced, shaped as `ParamPart.data`."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State of the wrapped module, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the wrapped module's state."""
        return self.module.load_state_dict(*args, **kwargs)
