"""Options that a run was given and makes no use of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

from mcore.config.command_line import flag_names
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.config.fields import flag_of
from mcore.config.run import RunConfig
from mcore.config.stability import parse_iterations
from mcore.config.transformer import TransformerConfig
from mcore.training.scalars import tensorboard_directory

_RECOMPUTED = next(
    field.default
    for field in dataclasses.fields(TransformerConfig)
    if field.name == "recompute_modules"
)


#: Bytes of a float32.
_WIDE = 4


class _Rule(NamedTuple):
    """Options, by section and field, that need another one."""

    fields: str
    are_used: Callable[[RunConfig], bool]
    otherwise: str


def _draws(config: RunConfig) -> bool:
    return tensorboard_directory(config) is not None or config.logging.wandb_project is not None


def _has_budget(config: RunConfig) -> bool:
    return config.training.max_tokens_per_microbatch is not None


_RULES = (
    _Rule(
        "optimizer.sgd_momentum",
        lambda config: config.optimizer.optimizer == "sgd",
        "it is for --optimizer sgd",
    ),
    _Rule(
        "optimizer.lion_beta1 optimizer.lion_beta2",
        lambda config: config.optimizer.optimizer == "lion",
        "it is for --optimizer lion",
    ),
    _Rule(
        "optimizer.muon_momentum optimizer.muon_nesterov optimizer.muon_split_qkv "
        "optimizer.muon_num_ns_steps optimizer.muon_coefficient_type optimizer.muon_scale_mode "
        "optimizer.muon_extra_scale_factor",
        lambda config: config.optimizer.optimizer == "muon",
        "it is for --optimizer muon",
    ),
    _Rule(
        "optimizer.adam_beta1 optimizer.adam_beta2 optimizer.adam_eps",
        lambda config: config.optimizer.optimizer in ("adam", "muon"),
        "it is for --optimizer adam and muon",
    ),
    _Rule(
        "optimizer.initial_loss_scale optimizer.min_loss_scale optimizer.loss_scale_window "
        "optimizer.hysteresis",
        lambda config: config.optimizer.scales_dynamically,
        "the loss has a changing scale only with --fp16 and without --loss-scale",
    ),
    _Rule(
        "optimizer.optimizer_offload_fraction",
        lambda config: config.optimizer.optimizer_cpu_offload,
        "it needs --optimizer-cpu-offload",
    ),
    _Rule(
        "scheduler.lr_wsd_decay_style scheduler.lr_wsd_decay_iters scheduler.lr_wsd_decay_samples",
        lambda config: config.scheduler.lr_decay_style == "WSD",
        "it needs --lr-decay-style WSD",
    ),
    _Rule(
        "gpt.rotary_base gpt.rotary_percent gpt.rotary_seq_len_interpolation_factor "
        "model.rotary_interleaved",
        lambda config: config.gpt.position_embedding_type == "rope",
        "it needs --position-embedding-type rope",
    ),
    _Rule(
        "gpt.rope_scaling_factor gpt.rope_low_freq_factor gpt.rope_high_freq_factor "
        "gpt.rope_original_max_positions",
        lambda config: config.gpt.use_rope_scaling,
        "it needs --use-rope-scaling",
    ),
    _Rule(
        "evaluation.eval_interval evaluation.start_eval_at_iter evaluation.full_validation "
        "evaluation.eval_micro_batch_size evaluation.eval_global_batch_size",
        lambda config: config.evaluation.eval_iters > 0,
        "--eval-iters is 0",
    ),
    _Rule(
        "pipeline.pipeline_schedule pipeline.max_in_flight_microbatches "
        "pipeline.microbatch_group_size_per_virtual_pipeline_stage "
        "pipeline.num_layers_per_virtual_pipeline_stage "
        "pipeline.account_for_embedding_in_pipeline_split "
        "pipeline.account_for_loss_in_pipeline_split pipeline.pipeline_model_parallel_layout "
        "pipeline.profile_pipeline model.virtual_pipeline_model_parallel_size "
        "model.use_tp_pp_dp_mapping",
        lambda config: config.model.pipeline_model_parallel_size > 1,
        "there is one pipeline rank",
    ),
    _Rule(
        "profiling.profile_step_start profiling.profile_step_end",
        lambda config: config.profiling.profile,
        "it needs --profile",
    ),
    _Rule(
        "profiling.profile_ranks",
        lambda config: config.profiling.profile or config.profiling.record_memory_history,
        "it needs --profile or --record-memory-history",
    ),
    _Rule(
        "profiling.memory_snapshot_path",
        lambda config: config.profiling.record_memory_history,
        "it needs --record-memory-history",
    ),
    _Rule(
        "stability.loss_spike_window stability.loss_spike_min_samples "
        "stability.loss_spike_threshold stability.loss_spike_min_rise "
        "stability.grad_norm_spike_min_factor stability.rerun_mode",
        lambda config: config.stability.loss_spike_policy != "off",
        "--loss-spike-policy is off",
    ),
    _Rule(
        "stability.loss_spike_max_skips",
        lambda config: (
            config.stability.loss_spike_policy != "off"
            or config.stability.grad_norm_skip_threshold is not None
        ),
        "it needs --loss-spike-policy or --grad-norm-skip-threshold",
    ),
    _Rule(
        "stability.loss_spike_max_rollbacks stability.loss_spike_lr_dip_iters",
        lambda config: config.stability.loss_spike_policy == "rollback",
        "it needs --loss-spike-policy rollback",
    ),
    _Rule(
        "stability.alert_timeout",
        lambda config: bool(config.stability.on_alert),
        "there is no --on-alert",
    ),
    _Rule(
        "training.exit_signal",
        lambda config: config.training.exit_signal_handler,
        "signals are not handled (--no-exit-signal-handler)",
    ),
    _Rule(
        "data.reset_position_ids data.reset_attention_mask data.eod_mask_loss data.mmap_bin_files",
        lambda config: not config.data.sft,
        "it is for token files; conversations (--sft) have positions and masks of their own",
    ),
    _Rule(
        "data.dataloader_type data.data_sharding data.num_workers",
        lambda config: not _has_budget(config),
        "training with --max-tokens-per-microbatch has its own order and reads within the step; "
        "only an evaluation goes by it",
    ),
    _Rule(
        "runtime.manual_gc_interval",
        lambda config: config.runtime.manual_gc,
        "it needs --manual-gc",
    ),
    _Rule(
        "model.distribute_saved_activations",
        lambda config: config.model.tensor_model_parallel_size > 1,
        "the tensor-parallel size is 1",
    ),
    _Rule(
        "model.fp32_residual_connection",
        lambda config: config.model.params_dtype.itemsize < _WIDE,
        "the model is in float32 as it is",
    ),
    _Rule(
        "model.sliding_window_first_layer",
        lambda config: config.model.sliding_window is not None,
        "it needs --sliding-window",
    ),
    _Rule(
        "data.sft_tokenizer_prompt_format",
        lambda config: config.data.sft,
        "it needs --sft",
    ),
    _Rule(
        "data.data_sharding",
        lambda config: config.data.dataloader_type == "cyclic" or _has_budget(config),
        "it is for --dataloader-type cyclic",
    ),
    _Rule(
        "scheduler.lr_warmup_init scheduler.lr_warmup_style",
        lambda config: any(
            (
                config.scheduler.lr_warmup_fraction,
                config.scheduler.lr_warmup_iters,
                config.scheduler.lr_warmup_samples,
            )
        ),
        "there is no warmup: give --lr-warmup-iters or the like",
    ),
    _Rule(
        "checkpoint.save_optim checkpoint.save_rng checkpoint.overwrite_save",
        lambda config: config.checkpoint.save is not None,
        "there is no --save",
    ),
    _Rule(
        "checkpoint.on_damaged_checkpoint checkpoint.load_optim checkpoint.load_rng",
        lambda config: config.checkpoint.load is not None,
        "there is no --load",
    ),
    _Rule(
        "logging.tensorboard_log_interval logging.tensorboard_queue_size "
        "logging.log_memory_to_tensorboard logging.log_world_size_to_tensorboard "
        "logging.log_timers_to_tensorboard",
        _draws,
        "there is no TensorBoard: give --tensorboard-dir or --save",
    ),
)


#: What needs a second data-parallel rank.
_SHARDING = "ddp.use_distributed_optimizer ddp.data_parallel_sharding_strategy"
_COMPARING = "training.check_weight_hash_across_dp_replicas_interval"
#: What goes to the memory of the host.
_OFFLOADED = "optimizer.optimizer_cpu_offload model.cpu_offloading_num_layers"
#: Numbers of layers.
_DEPTHS = "model.recompute_num_layers model.cpu_offloading_num_layers"


def idle_options(
    config: RunConfig, data_parallel_size: int | None = None, *, on_cpu: bool = False
) -> Iterator[tuple[str, str]]:
    """Flags without effect beside the others, each with the reason.

    Args:
        config: all options.
        data_parallel_size: that of the run; None = not known.
        on_cpu: the run computes on the CPU for certain.
    """
    if data_parallel_size == 1:
        reason = "there is one data-parallel rank, with nobody to share with"
        flags = _given(config, _COMPARING)
        flags += _given(config, _SHARDING) if config.ddp.sharding_stage else []
        yield from ((flag, reason) for flag in flags)
    if on_cpu:
        reason = "the device is the CPU, so all is in host memory already"
        yield from ((flag, reason) for flag in _given(config, _OFFLOADED))
    for path in _DEPTHS.split():
        given, most = getattr(config.model, path.split(".")[1]), config.model.num_layers
        if given is not None and given > most:
            yield f"{_given(config, path)[0]} beyond {most}", "the model has no more layers"
    model = config.model
    if model.sequence_parallel and model.tensor_model_parallel_size == 1:
        yield "--sequence-parallel", "the tensor-parallel size is 1"
    if model.recompute_granularity != "selective" and model.recompute_modules != _RECOMPUTED:
        yield "--recompute-modules", "it needs --recompute-granularity selective"
    for rule in _RULES:
        if not rule.are_used(config):
            yield from ((flag, rule.otherwise) for flag in _given(config, rule.fields))
    yield from _of_reports(config)
    yield from _beyond_the_end(config)
    if not config.ddp.grad_reduce_in_fp32 and model.params_dtype.itemsize >= _WIDE:
        yield "--grad-reduce-in-bf16", "gradients have the model's dtype, which is float32"
    yield from _of_data_parallelism(config.ddp, model.pipeline_model_parallel_size)


def remarks(config: RunConfig) -> Iterator[str]:
    """What an option does beside others that its name does not tell."""
    if config.optimizer.fp16 and not config.ddp.grad_reduce_in_fp32:
        yield (
            "--grad-reduce-in-bf16 with --fp16: gradients are accumulated and reduced in float16, "
            "where sums over microbatches and ranks overflow sooner; without it in float32"
        )


def _beyond_the_end(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Iterations that the run does not come to."""
    end = config.training.train_iters
    if end is None:
        return
    for window in parse_iterations(config.stability.iterations_to_skip or ()):
        if window.start > end:
            yield f"--iterations-to-skip {window.start}", f"the run ends with iteration {end}"
    start = config.profiling.profile_step_start
    if config.profiling.profile and start >= end:
        yield "--profile", f"it begins after iteration {start}, and the run ends with {end}"


def _of_reports(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Reports that have nothing to say, or nowhere to say it."""
    options = config.logging
    if options.log_progress and config.checkpoint.save is None:
        yield "--log-progress", "its file lies in the --save directory, and there is none"
    times = options.timing_log_level or options.log_straggler
    if options.log_timers_to_tensorboard and _draws(config) and not times:
        reason = "no part of a step is timed: give --timing-log-level 1 or 2"
        yield "--log-timers-to-tensorboard", reason


def _of_data_parallelism(
    ddp: DistributedDataParallelConfig, pipeline_size: int
) -> Iterator[tuple[str, str]]:
    stage = ddp.sharding_stage
    if ddp.reshard_every_microbatch and 0 < stage < 3:
        yield "--reshard-every-microbatch", f"parameters are not gathered with ZeRO-{stage}"
    if ddp.reshard_every_microbatch and stage == 3 and pipeline_size == 1:
        yield "--reshard-every-microbatch", "that is done anyway where there is no pipeline"
    overlaps = ddp.overlap_grad_reduce or ddp.overlap_param_gather
    reason = None
    if stage == 3:
        reason = "ZeRO-3 gathers and reduces layer by layer, beside the computation"
    elif stage < 2 and not overlaps:
        reason = "there is one bucket without --overlap-grad-reduce"
    given = {
        "--overlap-grad-reduce": stage == 3 and ddp.overlap_grad_reduce,
        "--overlap-param-gather": stage == 3 and ddp.overlap_param_gather,
        "--ddp-bucket-size": ddp.bucket_size is not None,
        "--ddp-num-buckets": ddp.num_buckets is not None,
    }
    if reason is not None:
        yield from ((flag, reason) for flag, is_given in given.items() if is_given)


def _given(config: RunConfig, fields: str) -> list[str]:
    """Flags of options whose values are not the defaults."""
    flags = []
    for name, wanted in (path.split(".") for path in fields.split()):
        section = getattr(config, name)
        field = next(field for field in dataclasses.fields(section) if field.name == wanted)
        described = flag_of(field)
        if described is not None and getattr(section, wanted) != field.default:
            flags.append(flag_names(field, described)[0])
    return flags
