"""The facade over the one parallel context of this process, with Megatron's names.

Getters answer from the context that `initialize_model_parallel` built; the context itself never
changes. Layers and functions read it only where a caller gave no group (`*_group_or`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from mcore.errors import ConfigError, NotInitializedError, TopologyError, UnsupportedError
from mcore.topology.context import ParallelContext
from mcore.topology.group import Group, as_group
from mcore.topology.placement import Location, StagePlacement
from mcore.topology.process_groups import build_context, destroy_groups, world
from mcore.topology.rank_layout import DEFAULT_ORDER, RankLayout
from mcore.topology.rank_layout import data_parallel_size as data_parallel_size_of

_CONTEXT: ParallelContext | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    data_parallel_size: int | None = None,
    order: str = DEFAULT_ORDER,
    stage_placement: StagePlacement | None = None,
    distributed_timeout_minutes: int | None = None,
) -> ParallelContext:
    """Build this process's groups and make them the ones that the getters answer from.

    Args:
        tensor_model_parallel_size: ranks that share each layer.
        pipeline_model_parallel_size: ranks that share the layers out.
        virtual_pipeline_model_parallel_size: model chunks on each pipeline rank.
        context_parallel_size: ranks that share each sequence.
        data_parallel_size: asserted against world size / (the product of the others).
        order: axes from fastest to slowest varying rank.
        stage_placement: where the stages of the pipeline live, from the schedule (a V placement has
            the first and the last stage on rank 0); Megatron's usual placement when None.
        distributed_timeout_minutes: timeout of the groups; torch's default when None.

    Returns:
        The context (Megatron returns nothing).

    Comm: creates process groups; every rank of the world has to call it with the same arguments. At
        world size 1 torch.distributed need not be initialised.

    Raises:
        TopologyError: the sizes do not fit the world, or it was called before.
    """
    global _CONTEXT  # the one context of the process, see the module docstring
    if _CONTEXT is not None:
        raise TopologyError(
            "model parallelism is initialised already; call destroy_model_parallel() first"
        )
    world_size, _ = world()
    tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
    _check_virtual_size(virtual_pipeline_model_parallel_size, world_size, tp * cp, pp)
    dp = data_parallel_size_of(world_size, tp=tp, pp=pp, cp=cp)
    if data_parallel_size is not None and data_parallel_size != dp:
        raise TopologyError(
            f"data_parallel_size ({data_parallel_size}) must be world size ({world_size}) / "
            f"(tensor {tp} x pipeline {pp} x context {cp}) = {dp}; leave it out or correct a size"
        )
    _check_placement(stage_placement, pp, virtual_pipeline_model_parallel_size)
    layout = RankLayout(tp=tp, cp=cp, dp=dp, pp=pp, order=order)
    minutes = distributed_timeout_minutes
    _CONTEXT = build_context(
        layout,
        virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size,
        stage_placement=stage_placement,
        timeout=None if minutes is None else timedelta(minutes=minutes),
    )
    return _CONTEXT


def _check_virtual_size(vpp: int | None, world_size: int, model: int, pp: int) -> None:
    """Refuse a virtual size that cannot be one; older code passes the data-parallel size third."""
    if vpp is None:
        return
    if vpp >= 1 and pp > 1:
        return
    hint = "it needs a pipeline of at least 2 ranks; leave it out"
    if vpp == world_size // (model * pp) and world_size % (model * pp) == 0:
        hint = (
            "the third argument is the virtual pipeline size, not the data-parallel size, which "
            "follows from the world size; leave it out or pass data_parallel_size=... by name"
        )
    raise TopologyError(
        f"virtual_pipeline_model_parallel_size is {vpp} with a pipeline of {pp}: {hint}"
    )


def _check_placement(placement: StagePlacement | None, pp: int, vpp: int | None) -> None:
    if placement is None or (placement.num_ranks, placement.num_chunks) == (pp, vpp or 1):
        return
    raise TopologyError(
        f"the stage placement is for {placement.num_ranks} ranks with {placement.num_chunks} "
        f"chunks each, the pipeline has {pp} ranks with {vpp or 1}; pass "
        f"virtual_pipeline_model_parallel_size={placement.num_chunks}"
    )


def destroy_model_parallel() -> None:
    """Forget the context and free its groups but the default one. Safe to call twice."""
    global _CONTEXT  # the one context of the process, see the module docstring
    if _CONTEXT is not None:
        destroy_groups(_CONTEXT)
    _CONTEXT = None


@contextmanager
def use_context(context: ParallelContext) -> Iterator[ParallelContext]:
    """Answer from another context inside a `with` block, in tests or to compute alone."""
    global _CONTEXT  # the one context of the process, see the module docstring
    previous, _CONTEXT = _CONTEXT, context
    try:
        yield context
    finally:
        _CONTEXT = previous


def get_parallel_context() -> ParallelContext:
    """The context of this process.

    Raises:
        NotInitializedError: `initialize_model_parallel` was not called.
    """
    if _CONTEXT is None:
        raise NotInitializedError(
            "model parallelism is not initialised; call "
            "mcore.parallel_state.initialize_model_parallel(...) first"
        )
    return _CONTEXT


def parallel_context_or_single() -> ParallelContext:
    """The context, or that of a single process where there is but one and nothing was initialised.

    Raises:
        NotInitializedError: several processes run and `initialize_model_parallel` was not called: a
            layer built then would silently compute as if alone.
    """
    if _CONTEXT is None and world()[0] == 1:
        return ParallelContext.single()
    return get_parallel_context()


def tensor_model_parallel_group_or(group: Group | dist.ProcessGroup | None) -> Group:
    """The given group, wrapped if raw, or this process's tensor-parallel group."""
    return parallel_context_or_single().tp if group is None else as_group(group, "tp")


def data_parallel_rank_or_first() -> int:
    """Position in the data-parallel group; 0 where `initialize_model_parallel` was not called."""
    return 0 if _CONTEXT is None else _CONTEXT.dp.rank


def model_parallel_is_initialized() -> bool:
    """Whether `initialize_model_parallel` was called."""
    return _CONTEXT is not None


is_initialized = model_parallel_is_initialized


def is_unitialized() -> bool:
    """Whether `initialize_model_parallel` was not called (Megatron's spelling)."""
    return _CONTEXT is None


def _handle(group: Group) -> dist.ProcessGroup:
    """The raw group; a `NotInitializedError` where there is none."""
    if group.handle is None:
        raise NotInitializedError(
            f"group {group.name} has no process group: torch.distributed is not initialised"
        )
    return group.handle


def get_tensor_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """Tensor-parallel process group; None if absent and `check_initialized` is False."""
    if not check_initialized and _CONTEXT is None:
        return None
    return _handle(get_parallel_context().tp)


def get_tensor_model_parallel_rank() -> int:
    """Position in the tensor-parallel group."""
    return get_parallel_context().tp.rank


def get_tensor_model_parallel_world_size() -> int:
    """Size of the tensor-parallel group."""
    return get_parallel_context().tp.size


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor-parallel group."""
    return get_parallel_context().tp.src_rank


def get_tensor_model_parallel_ranks() -> list[int]:
    """Global ranks of the tensor-parallel group."""
    return list(get_parallel_context().tp.ranks)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """Pipeline-parallel process group; None if absent and `check_initialized` is False."""
    if not check_initialized and _CONTEXT is None:
        return None
    return _handle(get_parallel_context().pp)


def get_pipeline_model_parallel_rank() -> int:
    """Position in the pipeline."""
    return get_parallel_context().pp.rank


def get_pipeline_model_parallel_world_size() -> int:
    """Number of pipeline ranks."""
    return get_parallel_context().pp.size


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage."""
    return get_parallel_context().pp.ranks[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage."""
    return get_parallel_context().pp.ranks[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage, wrapping around."""
    return get_parallel_context().pp.next_rank


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage, wrapping around."""
    return get_parallel_context().pp.prev_rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Model chunks on each pipeline rank, or None without interleaving."""
    return get_parallel_context().virtual_pipeline_model_parallel_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """None without interleaving; with it there is no current chunk, and none is guessed.

    Raises:
        UnsupportedError: several model chunks on each rank.
    """
    _refuse_current_chunk("get_virtual_pipeline_model_parallel_rank()")
    return None


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Accepted without interleaving, where it says nothing.

    Raises:
        UnsupportedError: several model chunks on each rank.
    """
    _refuse_current_chunk(f"set_virtual_pipeline_model_parallel_rank({rank})")


def _refuse_current_chunk(call: str) -> None:
    size = get_parallel_context().virtual_pipeline_model_parallel_size
    if size is not None:
        raise UnsupportedError(
            f"{call}: with {size} model chunks on each rank there is no current chunk; give "
            f"vp_stage=0 to {size - 1} to GPTModel, is_pipeline_first_stage and "
            "is_pipeline_last_stage"
        )


def _is_at(end: Location, ignore_virtual: bool, vp_stage: int | None) -> bool:
    context = get_parallel_context()
    size = context.virtual_pipeline_model_parallel_size
    if (ignore_virtual and vp_stage is None) or size is None:
        return context.pp.rank == end.rank
    if vp_stage is None:
        raise ConfigError(
            f"vp_stage is needed with {size} model chunks per rank; pass 0 to {size - 1}"
        )
    return (context.pp.rank, vp_stage) == end


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, and chunk `vp_stage` where virtual stages count, is the first stage."""
    first = get_parallel_context().placement.locations[0]
    return _is_at(first, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, and chunk `vp_stage` where virtual stages count, is the last stage."""
    last = get_parallel_context().placement.locations[-1]
    return _is_at(last, ignore_virtual, vp_stage)


def _data_group(with_context_parallel: bool) -> Group:
    context = get_parallel_context()
    return context.dp_cp if with_context_parallel else context.dp


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Data-parallel group; with context-parallel ranks, the one that gradients are summed over."""
    return _handle(_data_group(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Position in the data-parallel group."""
    return _data_group(with_context_parallel).rank


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Size of the data-parallel group."""
    return _data_group(with_context_parallel).size


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of the data-parallel group."""
    return _data_group(with_context_parallel).src_rank


def get_context_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """Context-parallel process group; None if absent and `check_initialized` is False."""
    if not check_initialized and _CONTEXT is None:
        return None
    return _handle(get_parallel_context().cp)


def get_context_parallel_rank() -> int:
    """Position in the context-parallel group."""
    return get_parallel_context().cp.rank


def get_context_parallel_world_size() -> int:
    """Size of the context-parallel group."""
    return get_parallel_context().cp.size


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context-parallel group."""
    return list(get_parallel_context().cp.ranks)


def get_model_parallel_group(check_initialized: bool = True) -> dist.ProcessGroup | None:
    """Ranks that hold one copy of the model; None if absent and `check_initialized` is False."""
    if not check_initialized and _CONTEXT is None:
        return None
    return _handle(get_parallel_context().mp)


def get_model_parallel_src_rank() -> int:
    """Global rank of the first member of the model-parallel group."""
    return get_parallel_context().mp.src_rank


def get_tensor_and_context_parallel_group(
    check_initialized: bool = True,
) -> dist.ProcessGroup | None:
    """Tensor- and context-parallel ranks; None if absent and `check_initialized` is False."""
    if not check_initialized and _CONTEXT is None:
        return None
    return _handle(get_parallel_context().tp_cp)


def get_tensor_and_context_parallel_rank() -> int:
    """Position in the group of tensor- and context-parallel ranks."""
    return get_parallel_context().tp_cp.rank


def get_tensor_and_context_parallel_world_size() -> int:
    """Number of tensor- and context-parallel ranks."""
    return get_parallel_context().tp_cp.size


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """All ranks of this pipeline stage.

    Raises:
        TopologyError: context-parallel ranks exist and are to be left out; mcore builds no such
            group.
    """
    context = get_parallel_context()
    if context.cp.size > 1 and not with_context_parallel:
        raise TopologyError(
            "there is no tensor-and-data group without context-parallel ranks; "
            "pass with_context_parallel=True"
        )
    return _handle(context.tp_dp_cp)


def get_embedding_group() -> dist.ProcessGroup:
    """First and last stage of this pipeline.

    Raises:
        TopologyError: this rank is on neither.
    """
    context = get_parallel_context()
    return _handle(context.member("embedding", context.embd))


def get_position_embedding_group() -> dist.ProcessGroup:
    """First stage of this pipeline.

    Raises:
        TopologyError: this rank is on another.
    """
    context = get_parallel_context()
    return _handle(context.member("position embedding", context.pos_embd))


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank, and chunk where virtual stages count, is the first or last stage."""
    first = is_pipeline_first_stage(ignore_virtual, vp_stage)
    return first or is_pipeline_last_stage(ignore_virtual, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank is on the first stage."""
    return get_parallel_context().pos_embd is not None


def get_expert_model_parallel_world_size() -> int:
    """Size of the expert-parallel group: 1, since mcore's models are dense."""
    get_parallel_context()
    return 1


def get_expert_model_parallel_rank() -> int:
    """Position in the expert-parallel group, which has one rank."""
    get_parallel_context()
    return 0
