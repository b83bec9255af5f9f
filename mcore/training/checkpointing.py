"""What a training checkpoint holds, and how a run starts from one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore import checkpoint
from mcore.checkpoint import RankLocal, ShardedTensor, sharded_parameter
from mcore.config.run import RunConfig
from mcore.distributed import ParamPart
from mcore.errors import CheckpointError, DamagedCheckpointError
from mcore.log import get_logger
from mcore.topology.context import ParallelContext
from mcore.training.checkpoint_fit import (
    check_model,
    check_optimizer,
    compare_threads,
    log_changes,
    log_unread,
    precise_source,
)
from mcore.training.checkpoint_writer import CheckpointWriter
from mcore.training.random_states import random_states, restore_random_states
from mcore.training.setup import TrainState


def save(
    state: TrainState, config: RunConfig, ctx: ParallelContext, writer: CheckpointWriter
) -> None:
    """Write everything that the run needs to go on, as `SAVE/iter_N` and the pointer to it.

    Comm: see `CheckpointWriter.write`; every rank has to call it.
    """
    with_optimizer = config.checkpoint.save_optim
    tensors = _model_tensors(state, for_save=True)
    if with_optimizer:
        tensors.update(_optimizer_tensors(state, for_save=True))
    common: dict[str, Any] = {
        "model": config.model_options(),
        "iteration": state.iteration,
        "consumed_train_samples": state.consumed_train_samples,
        "skipped_iterations": state.skipped_iterations,
        "skipped_train_samples": state.skipped_train_samples,
        "passed_over_samples": state.passed_over_samples,
        "autopilot": state.autopilot,
        "data_segments": state.data_segments,
        "evaluation_is_owed": state.evaluation_is_owed,
        "num_threads": torch.get_num_threads(),
        "config": config.to_dict(),
        "fingerprint": config.fingerprint(),
    }
    if with_optimizer:
        common["optimizer"] = {"step_count": state.optimizer.step_count}
        common["opt_param_scheduler"] = state.scheduler.state_dict()
        common["grad_scaler"] = state.optimizer.grad_scaler.state_dict()
    rank_local = None
    if config.checkpoint.save_rng:
        rank_local = RankLocal(ctx.rank, _layout(ctx), random_states())
    writer.write(state.iteration, tensors, common, rank_local)


def stored_model_options(
    config_load: str, step: int | None, *, fall_back: bool = True
) -> dict[str, Any]:
    """The model's options in the checkpoint that a run would start from, by option name.

    Args:
        config_load: save root, or one iteration's directory.
        step: iteration; None = the pointer decides.
        fall_back: use the one before a damaged one.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not describe its model.
    """
    found = checkpoint.candidates(config_load, step)[0] if fall_back else [Path(config_load)]
    for directory in found[:-1]:
        try:
            common = checkpoint.read_common(directory)
            break
        except DamagedCheckpointError:  # told when the run loads it
            continue
    else:
        common = checkpoint.read_common(found[-1], None if fall_back else step)
    options = common.get("model")
    if not isinstance(options, dict):
        raise CheckpointError(
            f"{config_load} does not say how its model is built; give the model's flags instead of "
            "--use-checkpoint-args"
        )
    return moved_tokenizer(options, found[-1])


def moved_tokenizer(options: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A model's options with its tokenizer where it is now.

    That of an import lies in its save root: where that has been moved, it is there.

    Args:
        options: as the checkpoint has them.
        directory: of the checkpoint, or its save root.
    """
    path = options.get("tokenizer_model")
    if path is None or Path(path).exists():
        return options
    for root in (directory, directory.parent):
        if (root / Path(path).name).exists():
            return options | {"tokenizer_model": str(root / Path(path).name)}
    return options


def load(
    state: TrainState,
    config: RunConfig,
    ctx: ParallelContext,
    on_damage: Callable[[Path], None] | None = None,
) -> Path:
    """Continue from a checkpoint of any layout, or take its weights only (`--finetune`).

    With `--skip-train` nothing is stepped: neither the optimizer's state nor the schedule is read.

    Args:
        state: of a run that has not begun.
        config: the run's.
        ctx: groups.
        on_damage: is told the directory of each checkpoint that is passed over.

    Returns:
        Its directory.

    Comm: see `mcore.checkpoint.load`; every rank has to call it.

    Raises:
        CheckpointError: the checkpoint is absent or does not fit, or it is damaged and there is no
            good one before it.
    """
    options = config.checkpoint
    assert options.load is not None
    if config.training.skip_train:
        config = replace(config, checkpoint=replace(options, load_optim=False))
    return checkpoint.first_good(
        options.load,
        lambda directory: _load_from(directory, state, config, ctx),
        iteration=options.ckpt_step,
        fall_back=options.on_damaged_checkpoint == "fallback",
        on_damage=on_damage,
    )


def go_back(
    state: TrainState,
    config: RunConfig,
    ctx: ParallelContext,
    path: str,
    on_damage: Callable[[Path], None] | None = None,
) -> Path:
    """Return to the newest good checkpoint of this run, with all that it holds.

    Args:
        state: of a run that has gone on since.
        config: the run's.
        ctx: groups.
        path: save root, or the directory of one iteration.
        on_damage: is told the directory of each checkpoint that is passed over.

    Returns:
        The checkpoint's directory.

    Comm: see `mcore.checkpoint.load`; every rank has to call it.

    Raises:
        CheckpointError: there is no good checkpoint.
    """
    options = replace(config.checkpoint, finetune=False, load_optim=True, load_rng=True)
    whole = replace(config, checkpoint=options)
    state.unsettled = None
    return checkpoint.first_good(
        path, lambda directory: _load_from(directory, state, whole, ctx), on_damage=on_damage
    )


def _load_from(directory: Path, state: TrainState, config: RunConfig, ctx: ParallelContext) -> Path:
    options = config.checkpoint
    common = checkpoint.read_common_together(directory)
    check_model(common, config)
    with_optimizer = options.load_optim and not options.finetune
    if with_optimizer:
        check_optimizer(common, directory)
    tensors = _model_tensors(state, for_save=False)
    tensors.update(_optimizer_tensors(state, for_save=False, only_weights=not with_optimizer))
    rank_local = None
    if options.load_rng and not options.finetune:
        rank_local = RankLocal(ctx.rank, _layout(ctx))
    result = checkpoint.load(
        directory,
        tensors,
        source=precise_source(tensors),
        # Parameters that are frozen now have no main parameter, and their own is read.
        partial=() if with_optimizer else ("main_param",),
        rank_local=rank_local,
    )
    state.optimizer.refresh_host_copies()
    log_unread(result.unexpected)
    log_changes(common, config)
    if options.finetune:
        get_logger().info("loaded weights of %s; the run starts at iteration 0", result.directory)
        return result.directory
    if with_optimizer:
        state.optimizer.step_count = common["optimizer"]["step_count"]
        state.scheduler.load_state_dict(common["opt_param_scheduler"])
        if common.get("grad_scaler"):
            state.optimizer.grad_scaler.load_state_dict(common["grad_scaler"])
    state.iteration = common["iteration"]
    state.consumed_train_samples = common["consumed_train_samples"]
    state.skipped_iterations = common.get("skipped_iterations", 0)
    state.skipped_train_samples = common.get("skipped_train_samples", 0)
    state.passed_over_samples = common.get("passed_over_samples", 0)
    state.autopilot = common.get("autopilot", {})
    state.data_segments = common.get("data_segments", [])
    state.evaluation_is_owed = common.get("evaluation_is_owed", False)
    if result.rank_local is not None:
        restore_random_states(result.rank_local)
    compare_threads(common)
    get_logger().info("loaded checkpoint %s: iteration %d", result.directory, state.iteration)
    return result.directory


def _model_tensors(state: TrainState, *, for_save: bool) -> dict[str, ShardedTensor]:
    """What the model computes with.

    ZeRO-3 holds main parameters in its place: a low-precision model is written from them, and read
    into memory of its own beside them.
    """
    parts = []
    for chunk in state.chunks:
        chunk.finish_param_sync()
        for part in chunk.held_parts():
            data = part.data
            if data.dtype != part.compute_dtype and (for_save or part.param.requires_grad):
                data = data.to(part.compute_dtype)
            parts.append(("model", part, data))
    return _sharded(parts, for_save)


def _optimizer_tensors(
    state: TrainState, *, for_save: bool, only_weights: bool = False
) -> dict[str, ShardedTensor]:
    """What the update rule goes on from; main parameters are weights, in the precision trained."""
    parts = [
        (kind, part, tensor)
        for part, tensors in state.optimizer.state_parts()
        for kind, tensor in tensors.items()
        if kind == "main_param" or not only_weights
    ]
    return _sharded(parts, for_save)


def _sharded(
    parts: Iterable[tuple[str, ParamPart, Tensor]], for_save: bool
) -> dict[str, ShardedTensor]:
    tensors: dict[str, ShardedTensor] = {}
    for kind, part, tensor in parts:
        key = f"{kind}.{part.name}"
        sharded = sharded_parameter(key, tensor, part.sharding, for_save=for_save, run=part.run)
        # A rank may hold a parameter and its tied copy.
        tensors[key] = tensors[key].joined(sharded) if key in tensors else sharded
    return tensors


def _layout(ctx: ParallelContext) -> dict[str, Any]:
    return {**ctx.layout.sizes, "order": ctx.layout.order}
