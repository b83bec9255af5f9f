"""Megatron's names for running a step: `get_forward_backward_func` and what it chooses from.

    forward_backward = get_forward_backward_func()
    records = forward_backward(
        forward_step_func=forward_step,   # (data_iterator, model) -> (output, loss_func)
        data_iterator=iterator,           # a list with one a chunk under interleaving
        model=model,                      # a list with one a chunk under interleaving
        num_microbatches=8, seq_length=1024, micro_batch_size=4,
    )

Each function looks up its plan, proved before it runs, and hands it to the one executor.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from mcore import parallel_state
from mcore.device import current_device
from mcore.errors import ConfigError
from mcore.pipeline_parallel.executor import ForwardStepFunc, PipelineExecutor
from mcore.pipeline_parallel.hooks import ScheduleHooks
from mcore.pipeline_parallel.p2p_communication import P2PCommunicator
from mcore.pipeline_parallel.pipeline import rank_program
from mcore.pipeline_parallel.schedule import Schedule, ScheduleName
from mcore.pipeline_parallel.user_config import (
    config_of,
    default_hooks,
    microbatch_group_size,
    stage_specs,
)
from mcore.topology.context import ParallelContext
from mcore.topology.placement import StagePlacement


class ForwardBackwardFunc(Protocol):
    """The signature that all schedules share."""

    def __call__(  # noqa: PLR0913  (Megatron's signature)
        self,
        *,
        forward_step_func: ForwardStepFunc,
        data_iterator: Any,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        hooks: ScheduleHooks | None = None,
        tensor_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
        dtype: torch.dtype | Sequence[torch.dtype] | None = None,
        adjust_tensor_shapes_fn: None = None,
        p2p_communicator: None = None,
        pg_collection: None = None,
    ) -> list[Any]:
        """Run all microbatches of one step on this rank; collective over the pipeline.

        Args:
            forward_step_func: `(data_iterator, model_chunk) -> (output, loss_func)`; on the last
                stage `loss_func(output)` is called and returns `(loss, dict)` (a mean, averaged
                over microbatches), `(loss_sum, num_tokens, dict)` or `(loss_sum, num_tokens)` (the
                step's gradient is the sum over all global tokens; finalize divides).
            data_iterator: passed to the forward step as it is; a list with one a chunk if there are
                several chunks.
            model: this rank's chunk, or the list of its chunks. A chunk that is not the first stage
                has `set_input_tensor([tensor])`, itself or inside wrappers named `module`.
            num_microbatches: m >= 1, the same on all ranks of the pipeline.
            seq_length: tokens in a sequence.
            micro_batch_size: sequences in a microbatch.
            decoder_seq_length: length of the sequences that travel between stages; None =
                seq_length.
            forward_only: evaluation: no backward, and no graph is built.
            collect_non_loss_data: with forward_only, record `loss_func(output, non_loss_data=True)`
                in place of losses.
            first_val_step: with forward_only, whether this is the first step of an evaluation: only
                then are chunks told which microbatch is the first (`set_is_first_microbatch`).
                None = every step.
            hooks: gradient synchronisation, loss scale and finalize; None = from the model's config
                (Megatron's `no_sync_func` and the like) and from wrappers with `no_sync`.
            tensor_shape: of the tensor between stages, or a list with one shape a tensor; None =
                [s/(c t), b, h] with h and sequence parallelism from the model's config, or whatever
                a stage returns if that config says variable_seq_lengths.
            dtype: of the tensors between stages, or a list with one a tensor; None =
                config.pipeline_dtype or that of the parameters.
            adjust_tensor_shapes_fn: Megatron's, as the two below; None alone is taken: shapes are
                what tensor_shape says, or vary.
            p2p_communicator: the pipeline's own is used.
            pg_collection: the groups are those of `initialize_model_parallel`.

        Returns:
            On the last stage one entry a microbatch: the dict of loss_func, or `(loss_sum,
            num_tokens)`. Elsewhere an empty list.

        Comm: point-to-point messages over the pipeline group, none when it has one rank; then
            whatever `hooks.finalize_grads` does.

        Raises:
            ConfigError: sizes that do not fit, or a shape or dtype that nothing says.
            ScheduleError: a forward step or loss that has no meaning here.
            ShapeError: a stage returns another shape than the one that travels.
        """


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, *, schedule: Schedule | None = None
) -> ForwardBackwardFunc:
    """The schedule for a pipeline.

    Args:
        pp_size: pipeline size; None = that of the initialised model parallelism.
        vp_size: model chunks a rank, None for one; read from there too when pp_size is None.
        schedule: any other schedule than Megatron's, such as `Schedule(name="zb-h1")`. One whose
            stages are not placed as usual (zb-v) also needs `initialize_model_parallel(
            stage_placement=schedule.placement(pp))`.

    Returns:
        `forward_backward_no_pipelining` for one rank, else `..._with_interleaving` where there are
        virtual stages, else `..._without_interleaving`.
    """
    if schedule is not None:
        return _entry_point(
            schedule, f"forward_backward_{schedule.name}", f"Schedule {schedule.name}."
        )
    if pp_size is None:
        ctx = parallel_state.parallel_context_or_single()
        pp_size = ctx.pp.size
        vp_size = ctx.virtual_pipeline_model_parallel_size if vp_size is None else vp_size
    if pp_size == 1:
        return forward_backward_no_pipelining
    if vp_size is None or vp_size == 1:
        return forward_backward_pipelining_without_interleaving
    return forward_backward_pipelining_with_interleaving


def _entry_point(schedule: Schedule | ScheduleName, name: str, summary: str) -> ForwardBackwardFunc:
    """A schedule's function, with the common signature; a name takes its options from the model."""

    def forward_backward(  # noqa: PLR0913  (Megatron's signature)
        *,
        forward_step_func: ForwardStepFunc,
        data_iterator: Any,
        model: nn.Module | Sequence[nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        hooks: ScheduleHooks | None = None,
        tensor_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
        dtype: torch.dtype | Sequence[torch.dtype] | None = None,
        adjust_tensor_shapes_fn: None = None,
        p2p_communicator: None = None,
        pg_collection: None = None,
    ) -> list[Any]:
        _refuse_foreign(
            adjust_tensor_shapes_fn=adjust_tensor_shapes_fn,
            p2p_communicator=p2p_communicator,
            pg_collection=pg_collection,
        )
        num_microbatches = _whole(num_microbatches)
        if collect_non_loss_data and not forward_only:
            raise ConfigError("collect_non_loss_data computes no loss: it needs forward_only=True")
        ctx = parallel_state.parallel_context_or_single()
        chunks = _chunks(model, ctx)
        chosen = schedule if isinstance(schedule, Schedule) else _from_model(schedule, chunks)
        _check_fit(chosen, chunks, ctx)
        program = rank_program(chosen, ctx.pp.size, ctx.pp.rank, num_microbatches, forward_only)
        own = (p.device for chunk in chunks for p in chunk.parameters())
        device = next(own, current_device())  # a stage may have no parameters
        p2p = None
        if ctx.pp.size > 1:
            length = seq_length if decoder_seq_length is None else decoder_seq_length
            specs = stage_specs(
                chunks, ctx, (length, micro_batch_size), tensor_shape=tensor_shape, dtype=dtype
            )
            p2p = P2PCommunicator(ctx.pp, specs, device)
        return (
            PipelineExecutor(
                rank=ctx.pp.rank,
                placement=chosen.placement(ctx.pp.size),
                program=program,
                chunks=chunks,
                data_iterators=_data_iterators(data_iterator, len(chunks)),
                forward_step_func=forward_step_func,
                num_microbatches=num_microbatches,
                p2p=p2p,
                device=device,
                hooks=default_hooks(chunks) if hooks is None else hooks,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
                marks_first_microbatch=not (forward_only and first_val_step is False),
            )
            .run()
            .records
        )

    forward_backward.__name__ = forward_backward.__qualname__ = name
    forward_backward.__doc__ = f"{summary}\n\n{ForwardBackwardFunc.__call__.__doc__}"
    return forward_backward


forward_backward_no_pipelining = _entry_point(
    "no-pipelining",
    "forward_backward_no_pipelining",
    "One rank holds the whole model: microbatches run one after another.",
)
forward_backward_pipelining_without_interleaving = _entry_point(
    "1f1b",
    "forward_backward_pipelining_without_interleaving",
    "1F1B over one model chunk a rank (`plan_1f1b`).",
)
forward_backward_pipelining_with_interleaving = _entry_point(
    "interleaved-1f1b",
    "forward_backward_pipelining_with_interleaving",
    "1F1B over several model chunks a rank (`plan_interleaved`).",
)


#: Of Megatron's arguments those that mcore has another way for.
_FOREIGN = {
    "adjust_tensor_shapes_fn": "say the shapes with tensor_shape=, or let them vary "
    "(config.variable_seq_lengths)",
    "p2p_communicator": "messages go through the pipeline's own",
    "pg_collection": "the groups are those of initialize_model_parallel",
}


def _refuse_foreign(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} must be None here: {_FOREIGN[name]}")


def _whole(num_microbatches: Any) -> int:
    try:
        return operator.index(num_microbatches)
    except TypeError:
        raise ConfigError(
            f"num_microbatches is {num_microbatches!r}; pass a whole number from 1 up"
        ) from None


def _chunks(model: nn.Module | Sequence[nn.Module], ctx: ParallelContext) -> list[nn.Module]:
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    wanted = ctx.virtual_pipeline_model_parallel_size
    if wanted is not None and len(chunks) != wanted:
        raise ConfigError(
            f"{len(chunks)} model chunks were given, and virtual_pipeline_model_parallel_size is "
            f"{wanted}: pass that many"
        )
    if not chunks:
        raise ConfigError("model is an empty list: pass this rank's model chunks")
    return chunks


def _from_model(name: ScheduleName, chunks: Sequence[nn.Module]) -> Schedule:
    """One of Megatron's schedules for these chunks."""
    group = microbatch_group_size(config_of(chunks[0])) if name == "interleaved-1f1b" else None
    return Schedule(name=name, num_chunks=len(chunks), group=group)


def _check_fit(schedule: Schedule, chunks: Sequence[nn.Module], ctx: ParallelContext) -> None:
    """Refuse a schedule for another number of chunks, or whose stages live elsewhere."""
    if len(chunks) != schedule.num_chunks:
        raise ConfigError(
            f"{len(chunks)} model chunks were given, and schedule {schedule.name} runs "
            f"{schedule.num_chunks} on a rank"
        )
    wanted = schedule.placement(ctx.pp.size)
    if wanted != (ctx.stage_placement or StagePlacement.usual(ctx.pp.size, len(chunks))):
        raise ConfigError(
            f"schedule {schedule.name} places its stages at {wanted.locations}: pass "
            "stage_placement=schedule.placement(pp) to initialize_model_parallel"
        )
    if schedule.splits_backward and any(
        isinstance(chunk, nn.parallel.DistributedDataParallel) for chunk in chunks
    ):
        raise ConfigError(
            f"schedule {schedule.name} computes weight gradients outside of the backward, where "
            "torch's DistributedDataParallel does not see them: use mcore.distributed's"
        )


def _data_iterators(data_iterator: Any, num_chunks: int) -> list[Any]:
    if not isinstance(data_iterator, list):
        if num_chunks > 1 and data_iterator is not None:
            raise ConfigError(
                f"data_iterator must be a list with one iterator for each of the {num_chunks} "
                f"model chunks: each chunk reads its own microbatches"
            )
        return [data_iterator] * num_chunks
    if len(data_iterator) != num_chunks:
        raise ConfigError(
            f"{len(data_iterator)} data iterators were given for {num_chunks} model chunks"
        )
    return data_iterator
