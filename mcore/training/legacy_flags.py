"""Spellings of other programs and other years: mapped to a field, noted, or refused by name.

Nothing here is ignored in silence: a flag that has no effect says so in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore.config.distributed import STRATEGIES

Settings = Mapping[tuple[str, str], Any]


@dataclass(frozen=True, slots=True)
class LegacyFlag:
    """One old or foreign flag.

    Attributes:
        flag: as typed.
        help: one line.
        sets: from the typed value to (section, field) -> value.
        note: said once when the flag is used; None = an equal spelling, nothing to say.
        options: how argparse reads it.
        yields: a typed value of the same field wins without a word.
    """

    flag: str
    help: str
    sets: Callable[[Any], Settings]
    note: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    yields: bool = False


_SWITCH: Mapping[str, Any] = {"action": "store_true"}


def _nothing(value: Any) -> Settings:
    del value
    return {}


def _to(section: str, name: str) -> Callable[[Any], Settings]:
    return lambda value: {(section, name): value}


def _zero_stage(value: Any) -> Settings:
    return {("ddp", "data_parallel_sharding_strategy"): STRATEGIES[value]}


def _fully_sharded(value: Any) -> Settings:
    return _zero_stage(3 if value else 0)


def _full_recompute(value: Any) -> Settings:
    del value
    return {
        ("model", "recompute_granularity"): "full",
        ("model", "recompute_method"): "uniform",
        ("model", "recompute_num_layers"): 1,
    }


def _rotary(value: Any) -> Settings:
    del value
    return {("gpt", "position_embedding_type"): "rope"}


_FUSIONS = (
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
)


def _no_effect(flag: str, why: str) -> LegacyFlag:
    return LegacyFlag(flag, f"No effect: {why}.", _nothing, f"{flag} has no effect: {why}", _SWITCH)


_FLAGS = (
    LegacyFlag(
        "--group-query-attention",
        "Share key/value heads between query heads; --num-query-groups says how many (default 1).",
        _nothing,
        None,
        _SWITCH,
    ),
    LegacyFlag(
        "--batch-size",
        "Old name of --micro-batch-size.",
        _to("training", "micro_batch_size"),
        "--batch-size is an old name: it sets --micro-batch-size",
        {"type": int, "metavar": "N"},
    ),
    LegacyFlag(
        "--checkpoint-activations",
        "Old name of full recomputation, one layer at a time.",
        _full_recompute,
        "--checkpoint-activations is an old name: it sets --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        _SWITCH,
    ),
    LegacyFlag(
        "--recompute-activations",
        "The same as --recompute-granularity selective.",
        lambda _: {("model", "recompute_granularity"): "selective"},
        None,
        _SWITCH,
    ),
    LegacyFlag(
        "--use-rotary-position-embeddings",
        "Old name of --position-embedding-type rope.",
        _rotary,
        "--use-rotary-position-embeddings is an old name: it sets --position-embedding-type rope",
        _SWITCH,
    ),
    LegacyFlag(
        "--rotary-position-embeddings-theta",
        "Megatron-DeepSpeed's name of --rotary-base.",
        _to("gpt", "rotary_base"),
        None,
        {"type": float, "metavar": "X"},
    ),
    LegacyFlag(
        "--data-impl",
        "Only mmap files exist; accepted so that old commands run.",
        _nothing,
        "--data-impl has no effect: data files are always the mmap kind",
        {"choices": ["mmap", "infer", "cached"]},
    ),
    LegacyFlag(
        "--dataset-impl",
        "Only mmap files exist; accepted so that old commands run.",
        _nothing,
        "--dataset-impl has no effect: data files are always the mmap kind",
        {"choices": ["mmap"]},
    ),
    LegacyFlag(
        "--overlap-comm",
        "DeepSpeed's name of --overlap-grad-reduce.",
        _to("ddp", "overlap_grad_reduce"),
        "--overlap-comm is DeepSpeed's name: it sets --overlap-grad-reduce",
        _SWITCH,
    ),
    LegacyFlag(
        "--reduce-scatter-bucket-size",
        "DeepSpeed's name of --ddp-bucket-size, in elements.",
        _to("ddp", "bucket_size"),
        "--reduce-scatter-bucket-size is DeepSpeed's name: it sets --ddp-bucket-size",
        {"type": int, "metavar": "N"},
    ),
    LegacyFlag(
        "--allgather-bucket-size",
        "DeepSpeed's name of --ddp-bucket-size, in elements.",
        _to("ddp", "bucket_size"),
        "--allgather-bucket-size is DeepSpeed's name: it sets --ddp-bucket-size",
        {"type": int, "metavar": "N"},
    ),
    LegacyFlag(
        "--zero-stage",
        "DeepSpeed's name of --data-parallel-sharding-strategy: 0 to 3.",
        _zero_stage,
        "--zero-stage is DeepSpeed's name: it sets --data-parallel-sharding-strategy",
        {"type": int, "choices": [0, 1, 2, 3]},
    ),
    LegacyFlag(
        "--use-torch-fsdp2",
        "Megatron's name of --data-parallel-sharding-strategy optim_grads_params.",
        _fully_sharded,
        "--use-torch-fsdp2 sets --data-parallel-sharding-strategy optim_grads_params",
        _SWITCH,
    ),
    LegacyFlag(
        "--use-megatron-fsdp",
        "Megatron's switch for --data-parallel-sharding-strategy, optim_grads_params by default.",
        _fully_sharded,
        "--use-megatron-fsdp sets --data-parallel-sharding-strategy",
        _SWITCH,
        yields=True,
    ),
    LegacyFlag(
        "--grad-reduce-in-bf16",
        "Accumulate and reduce gradients in the parameters' data type (bf16 or fp16).",
        lambda _: {("ddp", "grad_reduce_in_fp32"): False},
        None,
        _SWITCH,
    ),
    LegacyFlag(
        "--muon-no-split-qkv",
        "Older name of --no-muon-split-qkv.",
        lambda _: {("optimizer", "muon_split_qkv"): False},
        None,
        _SWITCH,
    ),
    LegacyFlag(
        "--muon-scalar-optimizer",
        "What updates all but the weight matrices: adam.",
        _nothing,
        "--muon-scalar-optimizer adam has no effect: it is the only one",
        {"choices": ["adam"]},
    ),
    LegacyFlag(
        "--DDP-impl",
        "Only Megatron's own (local) data parallelism exists.",
        _nothing,
        "--DDP-impl local has no effect: it is the only kind",
        {"choices": ["local"]},
    ),
    LegacyFlag(
        "--transformer-impl",
        "Only the local implementation exists.",
        _nothing,
        "--transformer-impl local has no effect: it is the only one",
        {"choices": ["local"]},
    ),
    LegacyFlag(
        "--ckpt-format",
        "mcore writes one format, which every layout reads.",
        _nothing,
        "--ckpt-format has no effect: checkpoints are always written in mcore's own format",
        {"choices": ["torch_dist", "torch"]},
    ),
    _no_effect("--use-mcore-models", "there is one set of models"),
    _no_effect("--use-flash-attn", "attention always takes torch's fastest kernel"),
    _no_effect("--calculate-per-token-loss", "the loss is always per token of the global batch"),
    _no_effect(
        "--accumulate-allreduce-grads-in-fp32", "gradients are always accumulated in float32"
    ),
    _no_effect("--attention-softmax-in-fp32", "softmax is always taken in float32 at least"),
    _no_effect("--use-cpu-initialization", "initial weights never depend on the device or layout"),
    _no_effect("--no-async-tensor-model-parallel-allreduce", "overlap never changes the numbers"),
    _no_effect("--use-dist-ckpt", "checkpoints are always distributed"),
    *(_no_effect(flag, "torch chooses its kernels by itself") for flag in _FUSIONS),
    LegacyFlag(
        "--attention-backend",
        "Attention always takes torch's fastest kernel.",
        _nothing,
        "--attention-backend has no effect: attention always takes torch's fastest kernel",
        {"choices": ["auto", "flash", "fused", "unfused", "local"]},
    ),
)

LEGACY: dict[str, LegacyFlag] = {item.flag.strip("-").replace("-", "_"): item for item in _FLAGS}

_NOT_BUILT: Mapping[str, tuple[str, ...]] = {
    "optimizer states on the CPU are not built yet; drop it": (
        "--cpu-optimizer",
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
    ),
    "DeepSpeed JSON configuration is not read yet; give the same settings as flags": (
        "--deepspeed",
        "--deepspeed_config",
        "--deepspeed-activation-checkpointing",
        "--partition-activations",
    ),
    "mixture-of-experts models are not built; drop it": (
        "--num-experts",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--moe-router-topk",
        "--moe-grouped-gemm",
        "--moe-aux-loss-coeff",
    ),
    "low precision below 16 bits needs transformer-engine, which mcore does not use; drop it": (
        "--fp8-format",
        "--fp8-recipe",
        "--fp8-param-gather",
        "--fp4-format",
        "--first-last-layers-bf16",
    ),
    "this way of overlapping needs transformer-engine, which mcore does not use; drop it": (
        "--tp-comm-overlap",
        "--tp-comm-overlap-cfg",
    ),
    "context parallelism is not built yet; drop it": (
        "--cp-comm-type",
        "--hierarchical-context-parallel-sizes",
        "--hybrid-context-parallel",
    ),
    "mcore always initialises its weights; drop it": ("--no-initialization",),
    "this option of the model is not built yet; drop it": (
        "--apply-layernorm-1p",
        "--squared-relu",
        "--quick-geglu",
        "--qk-l2-norm",
        "--qk-clip",
        "--use-mup",
        "--apply-query-key-layer-scaling",
        "--init-method-xavier-uniform",
        "--rotary-seq-len-interpolation-factor",
    ),
    "this report is not built yet; the log line, TensorBoard and --metrics-jsonl have the rest": (
        "--log-throughput",
        "--log-timers-to-tensorboard",
        "--log-memory-to-tensorboard",
        "--log-validation-ppl-to-tensorboard",
        "--log-world-size-to-tensorboard",
        "--log-progress",
        "--log-energy",
        "--log-straggler",
        "--log-memory-interval",
        "--timing-log-level",
        "--timing-log-option",
        "--wandb-project",
        "--wandb-exp-name",
        "--wandb-save-dir",
        "--wandb-entity",
    ),
    "Muon's products have the main parameters' precision; drop it": ("--muon-fp32-matmul-prec",),
    "profiling is not built yet; drop it": (
        "--profile",
        "--use-pytorch-profiler",
        "--profile-step-start",
        "--profile-step-end",
        "--profile-ranks",
        "--record-memory-history",
    ),
    "signals and timed exits are not built yet; use --exit-interval": (
        "--exit-duration-in-mins",
        "--exit-signal-handler",
        "--exit-signal",
    ),
    "this guard of a run's health is not built yet; drop it": (
        "--check-for-spiky-loss",
        "--check-for-large-grads",
        "--rerun-mode",
        "--iterations-to-skip",
        "--adlr-autoresume",
        "--enable-ft-package",
        "--inprocess-restart",
    ),
}


def refused_flags() -> dict[str, str]:
    """Known flags of Megatron and DeepSpeed that mcore lacks, with what to do instead."""
    return {flag: reason for reason, flags in _NOT_BUILT.items() for flag in flags}
