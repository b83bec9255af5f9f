"""ZeRO-3: parameters, gradients and optimizer state dealt to data-parallel ranks.

PyTorch's `fully_shard` does the gathering and reducing, layer by layer. What it does not know of is
settled here: tensor-parallel declarations, tied embeddings on other stages, several microbatches in
flight in a pipeline, sums instead of means, and the checkpoint's view of the shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mcore.config.distributed import DistributedDataParallelConfig
from mcore.device import current_device
from mcore.distributed.compute_dtypes import compute_dtypes, only_dtype, widened
from mcore.distributed.data_parallel import DataParallelModule, ParamPart
from mcore.distributed.param_units import param_units
from mcore.distributed.replicas import find_replicas
from mcore.distributed.sharding_groups import ShardingGroups, build_sharding_groups
from mcore.distributed.unit_agreement import UnitAgreement
from mcore.errors import ConfigError
from mcore.parallel_state import parallel_context_or_single
from mcore.topology.context import ParallelContext
from mcore.topology.flat_range import FlatRange
from mcore.topology.group import Group
from mcore.topology.param_sharding import (
    ParamSharding,
    global_named_parameters,
    set_sharding,
    sharding_of,
)


@dataclass(frozen=True, slots=True)
class _Shard:
    """A parameter of the model before and after it was dealt out."""

    name: str
    param: nn.Parameter  # a DTensor over the data-parallel ranks
    sharding: ParamSharding
    run: FlatRange
    data: Tensor  # this rank's rows, flat; what the optimizer updates
    compute_dtype: torch.dtype

    @property
    def part(self) -> ParamPart:
        return ParamPart(
            self.name, self.param, self.sharding, self.run, self.data, self.compute_dtype
        )


class FullyShardedDataParallel(DataParallelModule):
    """A model chunk of which each data-parallel rank holds a shard between uses.

    A layer's parameters are gathered for its forward and its backward; its gradients are
    reduce-scattered after every backward and accumulated in fp32. In a pipeline, where microbatches
    are in flight between them, parameters stay gathered until the step ends, unless
    `reshard_every_microbatch`. Low-precision models keep fp32 shards, which are the main
    parameters; gathered parameters have the model's dtype.

    Args:
        config: the model's configuration, kept for schedules to read.
        ddp_config: how gradients are reduced and sharded.
        module: the model chunk; its parameters become shards.
        context: groups; those of `initialize_model_parallel` by default.
        groups: which data-parallel ranks share what; made from `ddp_config` by default.

    Comm: see `find_replicas`. Every rank of a model-parallel group wraps its chunks together.

    Raises:
        ConfigError: torch.distributed is not in use, or parameters that are gathered together
            compute in different dtypes.
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
        if self.groups.all.handle is None:
            raise ConfigError(
                "optim_grads_params needs torch.distributed; start the program with torchrun, or "
                "drop the sharding strategy on one process"
            )
        declared = [
            (name, param, sharding_of(param, self.context.tp), param.dtype)
            for name, param in global_named_parameters(module)
        ]
        local = {id(param): name for name, param in module.named_parameters()}
        shapes = {local[id(param)]: tuple(param.shape) for _, param, _, _ in declared}
        own = (param.device for param in module.parameters())
        device = next(own, current_device())  # a pipeline stage may have no parameters
        self._deal_out(compute_dtypes(module), device)
        sharded = dict(module.named_parameters())
        for _, param, sharding, _ in declared:
            set_sharding(sharded[local[id(param)]], sharding)
        self._shards = [
            self._shard(name, sharded[local[id(param)]], shapes[local[id(param)]], sharding, dtype)
            for name, param, sharding, dtype in declared
        ]
        self._by_id = {id(shard.param): shard for shard in self._shards}
        self.replicas = find_replicas(module, self.context)
        gathered = set(self._units())
        units = [(name, unit) for name, unit in module.named_modules() if unit in gathered]
        self._agreement = UnitAgreement(units, self.groups.all, device)

    def _deal_out(self, dtypes: dict[nn.Parameter, torch.dtype], device: torch.device) -> None:
        """Hand the units to `fully_shard`, each with the one dtype that it computes with."""
        mesh = _mesh(self.groups, device.type)
        keeps = self.context.pp.size > 1 and not self.ddp_config.reshard_every_microbatch
        units, of_root = [], []
        for unit, params in param_units(self.module):
            # Vectors outside of layers go with the root: a collective of their own costs more.
            is_large = any(param.dim() > 1 for param in params)
            if unit is not self.module and is_large and not self._is_shared(unit):
                units.append((unit, params))
            else:
                of_root += params
        names = {param: name for name, param in self.module.named_parameters()}
        for unit, params in units:
            policy = self._policy(only_dtype(params, dtypes, names))
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps)
        policy = self._policy(only_dtype(of_root, dtypes, names))
        fully_shard(self.module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        for sharded in self._units():
            # Megatron's convention: a sum, divided once by the tokens of the global batch.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reshard_after_backward(not keeps)
            # Older versions of torch reduce what has a gradient on this rank, and only that.
            if "set_reduce_scatter_unused_params" in vars(FSDPModule):
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
            # Pads rows to the ranks now, so that the shards below stay where they are.
            sharded.unshard()
            sharded.reshard()

    def _policy(self, dtype: torch.dtype | None) -> MixedPrecisionPolicy:
        """Shards in fp32 at least, computation in a unit's own dtype."""
        narrow = None if dtype is None or dtype == widened(dtype) else dtype
        in_fp32 = self.ddp_config.keeps_grads_wide
        return MixedPrecisionPolicy(
            param_dtype=narrow,
            reduce_dtype=torch.float32 if narrow is not None and in_fp32 else narrow,
            cast_forward_inputs=False,
        )

    def _is_shared(self, unit: nn.Module) -> bool:
        """Whether a module outside of the unit computes with one of its parameters.

        A tied output layer is handed the shared matrix, so that stays gathered with the root.
        """
        tied = bool(self.module.__dict__.get("share_embeddings_and_output_weights", False))
        children = dict(self.module.named_children())
        return tied and unit in (children.get("embedding"), children.get("output_layer"))

    def _units(self) -> Iterator[FSDPModule]:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                yield module

    def _shard(
        self,
        name: str,
        param: nn.Parameter,
        shape: tuple[int, ...],
        sharding: ParamSharding,
        compute_dtype: torch.dtype,
    ) -> _Shard:
        data = _local(param)
        # `fully_shard` deals rows in runs of ceil(rows / ranks); the last ranks may have fewer.
        rows, inner = shape[0], (data[0].numel() if data.shape[0] else 0)
        start = min(rows, self.groups.shard.rank * -(-rows // self.groups.shard.size))
        run = FlatRange(shape, start * inner, data.numel())
        return _Shard(name, param, sharding, run, data.view(-1), compute_dtype)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing to hold back: every microbatch is reduced."""
        yield

    def start_grad_sync(self) -> None:
        """Nothing to start: every backward reduces."""

    def finish_grad_sync(self) -> None:
        """Free gathered parameters, and give parameters without a gradient a zero.

        Raises:
            ScheduleError: in a first step data-parallel ranks used different parts of the model.
        """
        self._agreement.end()
        for unit in self._units():
            unit.reshard()
        for shard in self._shards:
            if shard.param.requires_grad and shard.param.grad is None:
                shard.param.grad = torch.zeros_like(shard.param)

    def start_param_sync(self) -> None:
        """Nothing to collect: the next forward gathers what it needs."""

    def finish_param_sync(self) -> None:
        """Nothing to wait for."""

    def zero_grad_buffer(self) -> None:
        """Drop all gradients and gathered parameters, and begin a step."""
        for unit in self._units():
            unit.reshard()  # an evaluation leaves parameters gathered, which an update outdates
        for shard in self._shards:
            shard.param.grad = None

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all gradients by a number or a 0-dimensional tensor."""
        grads = [self.own_grad(s.param) for s in self._shards if s.param.requires_grad]
        if grads:
            torch._foreach_mul_(grads, factor)

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Global names and parameters."""
        for shard in self._shards:
            if shard.param.requires_grad:
                yield shard.name, shard.param

    def own_parts(self) -> Iterator[ParamPart]:
        """This rank's shard of each trained parameter; empty where there are more ranks than rows.

        Empty shards are yielded too, so that all ranks of a group count alike.
        """
        for shard in self._shards:
            if shard.param.requires_grad:
                yield shard.part

    def held_parts(self) -> Iterator[ParamPart]:
        """This rank's shard of each parameter."""
        for shard in self._shards:
            yield shard.part

    def held_gradients(self) -> Iterator[Tensor]:
        """The gradient of this rank's shard of each trained parameter."""
        for _, param in self.trained_parameters():
            if param.grad is not None:
                yield self.own_grad(param)

    def own_grad(self, param: nn.Parameter) -> Tensor:
        """The reduced gradient of this rank's shard, flat."""
        grad = param.grad
        assert grad is not None
        return _local(grad).view(-1)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor._local_tensor.detach()
    return local


def _mesh(groups: ShardingGroups, device_type: str) -> DeviceMesh:
    """The mesh that parameters are dealt over: shards, and their replicas in hybrid sharding."""
    if groups.replica.size == 1:
        return DeviceMesh.from_group(_handle(groups.shard), device_type, mesh_dim_names=("shard",))
    ranks = torch.tensor(groups.all.ranks).view(groups.replica.size, groups.shard.size)
    return DeviceMesh.from_group(
        [_handle(groups.replica), _handle(groups.shard)],
        device_type,
        mesh=ranks,
        mesh_dim_names=("replica", "shard"),
    )


def _handle(group: Group) -> dist.ProcessGroup:
    assert group.handle is not None
    return group.handle
