"""Rules between configurations. Each is one small function; nothing else checks across them.

A rule returns the problem in words (what, got, wanted, how to fix) or None. All problems of a
command line are reported together, before any process group exists.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from mcore.config import batch_checks
from mcore.config.command_line import flag_spellings, spelled_as_flags
from mcore.config.fields import AtFaultError, refuse
from mcore.config.optimizer import scheduler_steps
from mcore.config.run import RunConfig
from mcore.errors import ConfigError, TopologyError
from mcore.topology.placement import StagePlacement
from mcore.topology.rank_layout import data_parallel_size

Check = Callable[[RunConfig, int], str | None]


def _required(config: RunConfig, world_size: int) -> str | None:
    del world_size
    missing = _missing_sizes(config)
    if _lacks(config.optimizer, "lr"):
        missing.append("--lr")
    return f"missing: {', '.join(missing)}" if missing else None


def _missing_sizes(config: RunConfig) -> list[str]:
    needed = {
        "--micro-batch-size": ("micro_batch_size",),
        "--seq-length": ("seq_length",),
        "--train-iters (or --train-samples)": ("train_iters", "train_samples"),
    }
    return [flag for flag, names in needed.items() if _lacks(config.training, *names)]


def _lacks(section: Any, *names: str) -> bool:
    """Whether none of some fields has a value; one whose value is at fault has one."""
    try:
        return all(getattr(section, name) is None for name in names)
    except AtFaultError:
        return False


def _world(config: RunConfig, world_size: int) -> str | None:
    model = config.model
    try:
        data_parallel_size(
            world_size,
            tp=model.tensor_model_parallel_size,
            pp=model.pipeline_model_parallel_size,
            cp=model.context_parallel_size,
        )
    except TopologyError as error:
        return str(error)
    return None


def _sequence_parallel(config: RunConfig, world_size: int) -> str | None:
    del world_size
    model, training = config.model, config.training
    length = training.max_tokens_per_microbatch or training.seq_length
    tp = model.tensor_model_parallel_size
    if not model.sequence_parallel or length is None or length % tp == 0:
        return None
    return (
        f"--seq-length ({length}) must be divisible by --tensor-model-parallel-size ({tp}) with "
        f"--sequence-parallel; nearest: {length // tp * tp}, {-(-length // tp) * tp}"
    )


def _positions(config: RunConfig, world_size: int) -> str | None:
    del world_size
    positions, length = config.gpt.max_position_embeddings, config.training.seq_length
    if positions is None or length is None or length <= positions:
        return None
    return (
        f"--seq-length ({length}) exceeds --max-position-embeddings ({positions}); "
        f"shorten it or raise the other"
    )


def _rotary(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.gpt.position_embedding_type != "rope":
        return None
    channels = int(config.model.head_dim * config.gpt.rotary_percent)
    if channels >= 2 and channels % 2 == 0:
        return None
    return (
        f"--rotary-percent {config.gpt.rotary_percent} of {config.model.head_dim} channels a head "
        f"is {channels}; rotary positions need an even number of at least 2: change --kv-channels "
        "or --rotary-percent"
    )


def _split(config: RunConfig, world_size: int) -> str | None:
    del world_size
    shares = config.data.split
    if shares is None or any(float(s) > 0 for s in re.findall(r"\d+\.?\d*|\.\d+", shares)):
        return None
    return f"--split {shares!r} names no share above 0; write it like 969,30,1"


def _context_parallel(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.model.context_parallel_size == 1:
        return None
    return "--context-parallel-size above 1 is not built yet; use 1"


def _virtual(config: RunConfig, world_size: int) -> str | None:
    del world_size
    try:
        chunks = config.pipeline.num_chunks(config.model)
    except ConfigError as error:
        return str(error)
    if chunks is None or chunks == 1 or config.model.pipeline_model_parallel_size > 1:
        return None
    return (
        f"{chunks} virtual stages a rank (--num-virtual-stages-per-pipeline-rank and the like) "
        "need a --pipeline-model-parallel-size of at least 2; drop them or raise the pipeline size"
    )


def _layers(config: RunConfig, world_size: int) -> str | None:
    del world_size
    schedule, pp = config.pipeline.pipeline_schedule, config.model.pipeline_model_parallel_size
    if schedule is not None and schedule.startswith("file:"):
        return None  # where the stages live is in the file, which the training floor reads
    try:
        chunks = config.pipeline.num_chunks(config.model)
        placement = StagePlacement.usual(pp, chunks or 1)
        if schedule == "zb-v" and pp > 1:
            placement = StagePlacement.v(pp)
        config.pipeline.split(config.model, placement, (0.0, 0.0))
    except ConfigError as error:
        return str(error)
    return None


def _weight_gradients(config: RunConfig, world_size: int) -> str | None:
    del world_size
    schedule = config.pipeline.pipeline_schedule or ""
    if not schedule.startswith("zb-") or config.ddp.sharding_stage < 2:
        return None
    return (
        f"--pipeline-schedule {schedule} computes weight gradients after the backward, where the "
        "sharding strategies optim_grads and optim_grads_params do not see them; use optim or "
        "no_shard, or another schedule"
    )


def _schedule(config: RunConfig, world_size: int) -> str | None:
    del world_size
    training, schedule = config.training, config.scheduler
    if (training.train_iters is None) == (training.train_samples is None):
        return None  # told elsewhere
    try:
        steps = scheduler_steps(
            schedule,
            global_batch_size=1,  # lengths are only compared with each other
            train_iters=training.train_iters,
            train_samples=training.train_samples,
        )
    except ConfigError as error:
        return str(error)
    if not 0 <= steps.lr_warmup_steps < steps.lr_decay_steps:
        given = "--lr-warmup-samples" if training.train_iters is None else "--lr-warmup-iters"
        if schedule.lr_warmup_fraction is not None:
            given = "--lr-warmup-fraction"
        return (
            f"the warmup ({steps.lr_warmup_steps}, from {given}) must be shorter than "
            f"--lr-decay-iters or --lr-decay-samples ({steps.lr_decay_steps}; the training length "
            "when absent), which it is a part of"
        )
    return None


def _log_warmup(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.scheduler.lr_warmup_style != "log" or config.training.train_samples is None:
        return None
    return "--lr-warmup-style log counts iterations: train by --train-iters, or use linear"


def _warmup_init(config: RunConfig, world_size: int) -> str | None:
    del world_size
    lr, first = config.optimizer.lr, config.scheduler.lr_warmup_init
    if lr is None or first <= lr:
        return None
    return f"--lr-warmup-init ({first}) must not exceed --lr ({lr})"


def _weight_decay(config: RunConfig, world_size: int) -> str | None:
    del world_size
    schedule, constant = config.scheduler, config.optimizer.weight_decay
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if start is None or end is None:
        return None if constant >= 0 else f"--weight-decay is {constant}; it must not be negative"
    if 0 <= start <= end:
        return None
    return f"--start-weight-decay ({start}) and --end-weight-decay ({end}) must rise from 0 or more"


def _data(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.data.has_data:
        return None
    return "no training data: give --data-path PREFIX (see --help for the other forms)"


def _tokenizer(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.tokenizer.tokenizer_type is None:
        return "--tokenizer-type is missing; the vocabulary and the end-of-document id come from it"
    return None


def _precision(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.training.bf16 and config.optimizer.fp16:
        return "--bf16 and --fp16 exclude each other; give one"
    return None


def _main_grads(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.ddp.main_grads_dtype == "fp32" or config.training.bf16:
        return None
    return (
        "--main-grads-dtype bf16 needs --bf16: gradients of other models are kept in the "
        "parameters' dtype or in fp32"
    )


def _replicas(config: RunConfig, world_size: int) -> str | None:
    del world_size
    interval = config.training.check_weight_hash_across_dp_replicas_interval
    options = config.ddp
    if interval is None or options.sharding_stage < 3:
        return None
    if options.num_distributed_optimizer_instances > 1:
        return None
    return (
        "--check-weight-hash-across-dp-replicas-interval: with optim_grads_params no parameter has "
        "a replica to compare with; drop it, or use --num-distributed-optimizer-instances"
    )


def _instances(config: RunConfig, world_size: int) -> str | None:
    model, instances = config.model, config.ddp.num_distributed_optimizer_instances
    others = model.tensor_model_parallel_size * model.pipeline_model_parallel_size
    if world_size % others or (world_size // others) % instances == 0:
        return None
    return (
        f"--num-distributed-optimizer-instances ({instances}) must divide the data-parallel size "
        f"({world_size // others})"
    )


def _profiling(config: RunConfig, world_size: int) -> str | None:
    found = [*config.profiling.wrong_ranks(world_size)]
    if config.runtime.device == "cpu":
        found += config.profiling.without_cuda()
    return "; ".join(found) or None


def _save(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.checkpoint.save is not None and config.checkpoint.save_interval is None:
        return "--save needs --save-interval N, the iterations between checkpoints"
    return None


def _rollback(config: RunConfig, world_size: int) -> str | None:
    del world_size
    if config.stability.loss_spike_policy != "rollback":
        return None
    if config.checkpoint.save is None:
        return (
            "--loss-spike-policy rollback returns to checkpoints of this run: give --save DIR and "
            "--save-interval N"
        )
    if not config.checkpoint.save_optim:
        return "--loss-spike-policy rollback needs the optimizer's state: drop --no-save-optim"
    return None


CHECKS: tuple[Check, ...] = (
    _required,
    _world,
    batch_checks.batch,
    batch_checks.evaluation,
    batch_checks.step_schedule,
    batch_checks.train_samples,
    _sequence_parallel,
    _positions,
    _rotary,
    _split,
    _context_parallel,
    _virtual,
    _layers,
    _weight_gradients,
    batch_checks.token_budget,
    _schedule,
    _log_warmup,
    _warmup_init,
    _weight_decay,
    _data,
    _tokenizer,
    _precision,
    _main_grads,
    _replicas,
    _instances,
    _profiling,
    _save,
    _rollback,
)


def check(config: RunConfig, world_size: int) -> None:
    """Raise one `ConfigError` that lists everything wrong with a configuration."""
    sections = (getattr(config, field.name) for field in dataclasses.fields(config))
    flags = flag_spellings(map(type, sections))
    refuse([spelled_as_flags(problem, flags) for problem in problems_between(config, world_size)])


def problems_between(config: RunConfig, world_size: int) -> list[str]:
    """Everything wrong between the sections of a configuration, in words.

    Args:
        config: its sections may lack fields that are at fault (`mcore.config.partial`): rules that
            need one are left out, so that what is wrong elsewhere is told all the same.
        world_size: processes of the job.
    """
    found = []
    for rule in CHECKS:
        try:
            problem = rule(config, world_size)
        except AtFaultError:
            continue
        if problem is not None and problem not in found:
            found.append(problem)
    return found


#: What has to hold before a schedule can be simulated.
_BEFORE_SCHEDULES: tuple[Check, ...] = (
    _world,
    batch_checks.batch,
    batch_checks.evaluation,
    batch_checks.step_schedule,
    batch_checks.train_samples,
    batch_checks.token_budget,
    _context_parallel,
    _virtual,
    _layers,
    _weight_gradients,
)


def can_be_scheduled(config: RunConfig, world_size: int) -> bool:
    """Whether all is right that a pipeline's schedule depends on; `config` as above."""
    if _missing_sizes(config):
        return False
    try:
        return all(rule(config, world_size) is None for rule in _BEFORE_SCHEDULES)
    except AtFaultError:
        return False
