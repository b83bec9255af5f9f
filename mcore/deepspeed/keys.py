"""Every key of DeepSpeed's configuration (0.16) with what it means here.

Sizes are in elements. Optimizer and scheduler are in `recipes`, the batch triangle in `batch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore.config.distributed import STRATEGIES
from mcore.deepspeed.rules import Rule, boolean, number, only, option, refused, unused, whole
from mcore.deepspeed.translation import Translation

_TUNING = "mcore gathers and frees sharded parameters by layer"
_ALWAYS = "mcore always does so"
_OWN_REPORTS = "reports are --log-interval, --timing-log-level and --tensorboard-dir"
#: Of two, that float32 holds.
_HIGHEST_POWER = 127
_ROBUST = "checkpoints are mcore's own"


def _stage(value: Any) -> str:
    if isinstance(value, bool):
        return STRATEGIES[int(value)]
    stage = whole(value)
    if stage not in range(len(STRATEGIES)):
        raise ValueError("use 0, 1, 2 or 3")
    return STRATEGIES[stage]


def _gather_bucket(translation: Translation, path: str, value: Any) -> None:
    """One size serves both directions: that of reduction, which is read first, where both are."""
    if translation.value("ddp", "bucket_size") is None:
        option("ddp", "bucket_size", whole)(translation, path, value)
    elif translation.value("ddp", "bucket_size") != value:
        translation.no_effect(path, "the bucket size of reduction serves gathering too")


def _loss_scale(translation: Translation, path: str, value: Any) -> None:
    if value != 0:
        option("optimizer", "loss_scale", number)(translation, path, value)
        return
    typed = translation.given("optimizer", "loss_scale")
    if typed is not None:
        translation.refuse(
            path, value, f"0 is a dynamic scale, and --loss-scale {typed:g} a constant; drop one"
        )


def _power_of_two(value: Any) -> float:
    power = whole(value)
    if not 0 <= power <= _HIGHEST_POWER:
        raise ValueError(f"use a whole number from 0 to {_HIGHEST_POWER}")
    return 2.0**power


def _data_type(translation: Translation, path: str, value: Any) -> None:
    """A type for gradients: float32, or that of the parameters."""
    names = {"fp32": None, "float32": None, "bf16": "bf16", "bfp16": "bf16", "fp16": "fp16"}
    names["bfloat16"], names["float16"] = "bf16", "fp16"
    if value is None:
        return
    if not isinstance(value, str) or value not in names:
        translation.refuse(path, value, "use fp32, bf16 or fp16")
        return
    kind = names[value]
    precision = "bf16" if translation.value("training", "bf16") else "fp16"
    if kind is None:
        translation.set(path, "ddp", "grad_reduce_in_fp32", True)
    elif kind == precision and translation.value("optimizer", "fp16") is not False:
        translation.set(path, "ddp", "grad_reduce_in_fp32", False)
    else:
        translation.refuse(
            path, value, "gradients are of float32 or of the parameters' type; write fp32"
        )


def _offload_device(translation: Translation, path: str, value: Any) -> None:
    if value == "cpu":
        translation.set(path, "optimizer", "optimizer_cpu_offload", True)
    elif value not in (None, "none"):
        translation.refuse(path, value, "optimizer states go to host memory at most; write cpu")


ZERO: Mapping[str, Rule] = {
    "stage": option("ddp", "data_parallel_sharding_strategy", _stage),
    "reduce_bucket_size": option("ddp", "bucket_size", whole),
    "allgather_bucket_size": _gather_bucket,
    "overlap_comm": option("ddp", "overlap_grad_reduce", boolean),
    "allgather_partitions": unused(_ALWAYS, True),
    "reduce_scatter": unused(_ALWAYS, True),
    "contiguous_gradients": unused("gradients always lie in contiguous buffers", True),
    "use_multi_rank_bucket_allreduce": unused(_ALWAYS, True),
    "round_robin_gradients": unused("ranks hold equal shares", False),
    "load_from_fp32_weights": unused(_ROBUST, True),
    "ignore_unused_parameters": unused("unused parameters keep a zero gradient", True),
    "legacy_stage1": only(False, otherwise="drop it"),
    "elastic_checkpoint": only(False, otherwise="every checkpoint loads at every layout; drop it"),
    "offload_optimizer.device": _offload_device,
    "offload_optimizer.ratio": option("optimizer", "optimizer_offload_fraction", number),
    "offload_optimizer.pin_memory": unused("host memory is pinned where CUDA uses it"),
    "offload_optimizer.nvme_path": unused("nothing is kept on a disk", None),
    "offload_optimizer.buffer_count": unused("nothing is kept on a disk"),
    "offload_optimizer.pipeline_read": unused("nothing is kept on a disk", False),
    "offload_optimizer.pipeline_write": unused("nothing is kept on a disk", False),
    "offload_optimizer.fast_init": unused("nothing is kept on a disk", False),
    "offload_param.device": only(
        None, "none", otherwise="parameters stay on the device; stage 3 shares them out"
    ),
    **{
        f"offload_param.{name}": unused("parameters stay on the device")
        for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")
    },
    "sub_group_size": unused("all parameters are updated at once"),
    **{
        f"{prefix}{name}": unused(_TUNING)
        for prefix in ("stage3_", "")
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "module_granularity_threshold",
        )
    },
    **{
        name: unused("`mcore convert` writes whole weights", False)
        for name in (
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
        )
    },
    "zero_hpz_partition_size": only(
        1, otherwise="shards inside a node are --num-distributed-optimizer-instances"
    ),
    "mics_shard_size": only(
        -1, otherwise="shards inside a group are --num-distributed-optimizer-instances"
    ),
    **{
        name: only(False, otherwise="traffic is not quantised; drop it")
        for name in (
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
        )
    },
    "zeropp_loco_param": only(None, otherwise="traffic is not quantised; drop it"),
    **{
        name: unused(_TUNING, True, False)
        for name in (
            "memory_efficient_linear",
            "override_module_apply",
            "log_trace_cache_warnings",
            "mics_hierarchical_params_gather",
        )
    },
}

FP16: Mapping[str, Rule] = {
    "loss_scale": _loss_scale,
    "initial_scale_power": option("optimizer", "initial_loss_scale", _power_of_two),
    "loss_scale_window": option("optimizer", "loss_scale_window", whole),
    "hysteresis": option("optimizer", "hysteresis", whole),
    "min_loss_scale": option("optimizer", "min_loss_scale", number),
    "consecutive_hysteresis": only(
        False, otherwise="hysteresis is refilled when the scale grows; drop it"
    ),
    "auto_cast": only(False, otherwise="inputs are token ids; drop it"),
    "fp16_master_weights_and_grads": only(False, otherwise="main parameters are float32; drop it"),
}

BF16: Mapping[str, Rule] = {
    "immediate_grad_update": unused("gradients are accumulated as they come", True, False),
}

ACTIVATION_CHECKPOINTING: Mapping[str, Rule] = {
    "cpu_checkpointing": only(
        False,
        otherwise="activations in host memory are --cpu-offloading-num-layers; write false",
    ),
    "contiguous_memory_optimization": unused("the allocator keeps recomputed inputs", False),
    "number_checkpoints": unused("it follows from --num-layers", None),
    "synchronize_checkpoint_boundary": unused("layers are never waited for", False),
    "profile": unused(_OWN_REPORTS, False),
}

TOP: Mapping[str, Rule] = {
    "gradient_clipping": option("optimizer", "clip_grad", number),
    "communication_data_type": _data_type,
    "seq_parallel_comm_data_type": only(
        "fp32", otherwise="gradients of sequence-parallel parameters are summed in float32"
    ),
    "prescale_gradients": unused("gradients are divided once, after their sum", False),
    "gradient_predivide_factor": unused("gradients are divided once, after their sum", 1.0, 1),
    "steps_per_print": unused("the log line comes every --log-interval iterations"),
    "wall_clock_breakdown": unused(_OWN_REPORTS, False),
    "memory_breakdown": unused(_OWN_REPORTS, False),
    "dump_state": unused("`mcore check` prints the configuration", False),
    "zero_allow_untested_optimizer": unused("every optimizer shards", True, False),
    "zero_force_ds_cpu_optimizer": unused("there is one Adam", True, False),
    "disable_allgather": unused(_ALWAYS, False),
    "dataloader_drop_last": unused("batches are always whole", True, False),
    "sparse_gradients": only(False, otherwise="gradients of the embedding are dense; drop it"),
    "graph_harvesting": only(False, otherwise="CUDA graphs are not built; drop it"),
    "checkpoint": unused(_ROBUST),
    "tensorboard": refused("TensorBoard is --tensorboard-dir; drop the block"),
    "wandb": refused("Weights & Biases is --wandb-project; drop the block"),
    "csv_monitor": refused("figures by iteration are --metrics-jsonl; drop the block"),
    "comet": refused("figures by iteration are --metrics-jsonl; drop the block"),
    "flops_profiler": refused("profiles are --profile; drop the block"),
    "comms_logger": refused("collectives are measured by `mcore selftest`; drop the block"),
    "amp": refused("precision is bf16 or fp16; drop the block"),
    "tensor_parallel": refused("the size is --tensor-model-parallel-size; drop the block"),
    "pipeline": refused("stages are --pipeline-model-parallel-layout; drop the block"),
    "hybrid_engine": refused("training for chats is not built; drop the block"),
    "aio": refused("nothing is kept on a disk; drop the block"),
    **{
        name: refused("not built; drop the block")
        for name in (
            "nebula",
            "elasticity",
            "autotuning",
            "compression_training",
            "data_efficiency",
            "curriculum_learning",
            "progressive_layer_drop",
            "eigenvalue",
            "sparse_attention",
            "weight_quantization",
            "moe",
        )
    },
}
