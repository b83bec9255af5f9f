"""Which parameters an optimizer updates together, and with what precision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mcore.config.optimizer import OptimizerConfig
from mcore.device import host_copy, is_on_host
from mcore.distributed import DataParallelModule, ParamPart
from mcore.optimizer.whole_matrices import DealtMatrix
from mcore.topology.context import ParallelContext
from mcore.topology.flat_range import FlatRange
from mcore.topology.param_sharding import ParamSharding, global_named_parameters, sharding_of

ParamGroup = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizedParam:
    """A parameter, or the run of it that this rank updates, and what the update rule works on.

    Attributes:
        part: which elements of which parameter, and where they live.
        main: what is updated: an fp32 copy of `part.data` where that has lower precision, else the
            same memory. Shaped as the parameter where this rank updates all of it, else 1-D.
        read_gradient: gives the finished gradient, shaped as `main`, of any precision, or None:
            from the data-parallel wrapper, or autograd's.
        is_offloaded: `main` is a copy in host memory, whatever its dtype.
    """

    part: ParamPart
    main: nn.Parameter
    read_gradient: Callable[[], Tensor | None]
    is_offloaded: bool = False

    @property
    def name(self) -> str:
        """Global name, the same at every layout."""
        return self.part.name

    @property
    def param(self) -> nn.Parameter:
        """The model's parameter."""
        return self.part.param

    @property
    def sharding(self) -> ParamSharding:
        """How the parameter is cut over tensor-parallel ranks."""
        return self.part.sharding

    @property
    def is_copied(self) -> bool:
        """Whether `main` has to be copied back to the model after an update."""
        return self.is_offloaded or self.main.dtype != self.part.data.dtype

    @property
    def has_main_param(self) -> bool:
        """Whether the updated values are more precise than those that the model computes with."""
        return self.main.dtype != self.part.compute_dtype

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies: not to biases and parameters that are 1-D as a whole."""
        is_bias = self.name == "bias" or self.name.endswith(".bias")
        return len(self.sharding.global_shape) > 1 and not is_bias

    @property
    def is_matrix(self) -> bool:
        """Whether it is a weight matrix of a layer: 2-D as a whole, no embedding and no output."""
        return is_layer_matrix(self.name, self.sharding)

    @property
    def is_embedding_or_output(self) -> bool:
        """Whether it is the word embedding or the output layer, by Megatron's names."""
        return self.name.endswith(("word_embeddings.weight", "output_layer.weight"))

    def counted(self, tensor: Tensor) -> Iterator[Tensor]:
        """The parts of a tensor shaped as `main` that this rank counts, each element once."""
        for _, view in self.part.run.views(tensor, self.sharding, owned_only=True):
            yield view


def is_layer_matrix(name: str, sharding: ParamSharding) -> bool:
    """Whether a parameter is a weight matrix of a layer, which Muon orthogonalises."""
    outside = ("embeddings.weight", "output_layer.weight")
    return len(sharding.global_shape) == 2 and not name.endswith(outside)


def collect_params(
    model_chunks: Sequence[nn.Module], context: ParallelContext, config: OptimizerConfig
) -> list[OptimizedParam]:
    """What this rank updates, with main parameters where they are needed."""
    found = [(chunk, part) for chunk in model_chunks for part in _parts(chunk, context)]
    wrapped = [chunk for chunk in model_chunks if isinstance(chunk, DataParallelModule)]
    tied = {key for chunk in wrapped for key in chunk.replicas.tied_keys}
    offloaded = choose_offloaded([part for _, part in found], config, tied)
    return [
        OptimizedParam(
            part,
            _main_param(part, number in offloaded),
            _gradient_source(chunk, part.param),
            number in offloaded,
        )
        for number, (chunk, part) in enumerate(found)
    ]


def choose_offloaded(
    parts: Sequence[ParamPart], config: OptimizerConfig, tied: Collection[str] = ()
) -> set[int]:
    """Numbers of the parts whose state goes to the host: the first, up to the asked fraction.

    Parts that are in host memory already are left alone. Of parameters with a copy on another stage
    either all copies go or none: host and device round differently, and copies would drift apart.

    Args:
        parts: what this rank updates.
        config: whether, and which fraction by elements.
        tied: names of parameters with a copy on another stage.
    """
    if not config.optimizer_cpu_offload:
        return set()
    movable = [i for i, part in enumerate(parts) if not is_on_host(part.data)]
    limit = config.optimizer_offload_fraction * sum(parts[i].data.numel() for i in movable)
    stays = tied if config.optimizer_offload_fraction < 1.0 else ()
    chosen, taken = set(), 0
    for i in movable:
        if taken < limit and parts[i].name not in stays:
            chosen.add(i)
            taken += parts[i].data.numel()
    return chosen


def collect_matrices(
    model_chunks: Sequence[nn.Module], params: Sequence[OptimizedParam], context: ParallelContext
) -> list[tuple[DealtMatrix, OptimizedParam | None]]:
    """All weight matrices of layers with what this rank updates of each, alike on all ranks."""
    own = {id(item.param): item for item in params}
    matrices = []
    for chunk in model_chunks:
        for name, param in _trained(chunk):
            sharding = sharding_of(param, context.tp)
            if is_layer_matrix(name, sharding):
                item = own.get(id(param))
                has_any = item is not None and item.part.run.numel > 0
                run = item.part.run if item is not None and has_any else None
                matrices.append((DealtMatrix(name, sharding, run), item if has_any else None))
    return matrices


def _trained(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(chunk, DataParallelModule):
        yield from chunk.trained_parameters()
        return
    for name, param in global_named_parameters(chunk):
        if param.requires_grad:
            yield name, param


def _parts(chunk: nn.Module, context: ParallelContext) -> Iterator[ParamPart]:
    if isinstance(chunk, DataParallelModule):
        yield from chunk.own_parts()
        return
    for name, param in _trained(chunk):
        sharding = sharding_of(param, context.tp)
        run = FlatRange.whole(param)
        yield ParamPart(name, param, sharding, run, param.detach(), param.dtype)


def _gradient_source(chunk: nn.Module, param: nn.Parameter) -> Callable[[], Tensor | None]:
    if isinstance(chunk, DataParallelModule):
        return lambda: chunk.own_grad(param)
    return lambda: param.__dict__.get("main_grad", param.grad)


def build_param_groups(
    params: Sequence[OptimizedParam], config: OptimizerConfig
) -> list[ParamGroup]:
    """A group with weight decay and one without, also where a pipeline stage leaves one empty.

    With Muon the weight matrices of layers are a group of their own.

    A learning rate of their own (`decoupled_lr`) puts the word embedding and the output layer into
    a group that carries `max_lr` and `min_lr`. The others carry none, unlike Megatron's: the
    scheduler has them, and a second copy would win over it when the schedule is changed.
    """
    groups: list[ParamGroup] = []
    kinds = [_Kind(is_decayed=True), _Kind(is_decayed=False)]
    if config.decoupled_lr is not None:
        kinds.append(_Kind(is_decayed=True, is_decoupled=True))
    if config.optimizer == "muon":
        kinds.append(_Kind(is_decayed=True, is_matrix=True))
    for kind in kinds:
        wd_mult = 1.0 if kind.is_decayed else 0.0
        group: ParamGroup = {
            "params": [p.main for p in params if _Kind.of(p, config) == kind],
            "lr": config.decoupled_lr if kind.is_decoupled else config.lr,
            "weight_decay": config.weight_decay * wd_mult,
            "lr_mult": 1.0,
            "wd_mult": wd_mult,
            "is_matrix": kind.is_matrix,
        }
        if kind.is_decoupled:
            lowest = config.decoupled_min_lr
            group["max_lr"] = config.decoupled_lr
            group["min_lr"] = config.min_lr if lowest is None else lowest
        groups.append(group)
    return groups


@dataclass(frozen=True, slots=True)
class _Kind:
    """What parameters of one group have in common."""

    is_decayed: bool
    is_decoupled: bool = False
    is_matrix: bool = False

    @classmethod
    def of(cls, param: OptimizedParam, config: OptimizerConfig) -> _Kind:
        decoupled = config.decoupled_lr is not None and param.is_embedding_or_output
        matrix = config.optimizer == "muon" and param.is_matrix
        return cls(param.is_decayed, decoupled, matrix)


def _main_param(part: ParamPart, is_offloaded: bool) -> nn.Parameter:
    dtype = torch.promote_types(part.data.dtype, torch.float32)
    if is_offloaded:
        return nn.Parameter(host_copy(part.data.to(dtype)))
    if dtype != part.data.dtype:
        return nn.Parameter(part.data.to(dtype))
    # The same memory under a name of the optimizer's own: a gradient set there is not the model's.
    return nn.Parameter(part.data)
