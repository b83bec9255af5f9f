"""Spellings of other programs and other years: mapped to a field, noted, or refused by name.

Nothing here is ignored in silence: a flag that has no effect says so in one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore.config.distributed import STRATEGIES
from mcore.errors import ConfigError
from mcore.training.deepspeed_flags import DEEPSPEED_FLAGS
from mcore.training.legacy_flag import (
    NUMBER,
    WORD,
    LegacyFlag,
    Settings,
    alias,
    by_name,
    fixed,
    no_effect,
    to,
)
from mcore.training.refused_flags import REFUSED


def _fully_sharded(value: Any) -> Settings:
    return {("ddp", "data_parallel_sharding_strategy"): STRATEGIES[3 if value else 0]}


def _full_recompute(value: Any) -> Settings:
    del value
    return {
        ("model", "recompute_granularity"): "full",
        ("model", "recompute_method"): "uniform",
        ("model", "recompute_num_layers"): 1,
    }


def _window(value: str) -> Settings:
    """Megatron's (left, right): so many tokens before a token, and after it, -1 = all."""
    try:
        left, right = (int(word) for word in value.strip("() ").split(","))
    except ValueError:
        raise ConfigError(
            f"--window-size {value!r} is no pair of whole numbers such as 4095,0"
        ) from None
    if right not in (0, -1) or left < -1:
        raise ConfigError(
            f"--window-size {value}: tokens after a token are never seen by a GPT model; "
            "write LEFT,0"
        )
    return {} if left == -1 else {("model", "sliding_window"): left + 1}


_FUSIONS = ("masked-softmax", "bias-gelu", "bias-swiglu", "bias-dropout", "rope")

_RENAMED = (
    LegacyFlag(
        "--group-query-attention",
        "Share key/value heads between query heads; --num-query-groups says how many (default 1).",
    ),
    LegacyFlag(
        "--batch-size",
        "Old name of --micro-batch-size.",
        to("training", "micro_batch_size"),
        "--batch-size is an old name: it sets --micro-batch-size",
        NUMBER,
    ),
    alias(
        "--model-parallel-size",
        "model",
        "tensor_model_parallel_size",
        "--tensor-model-parallel-size",
        NUMBER,
    ),
    LegacyFlag(
        "--checkpoint-activations",
        "Old name of full recomputation, one layer at a time.",
        _full_recompute,
        "--checkpoint-activations is an old name: it sets --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        yields=("recompute_num_layers", "recompute_method"),
    ),
    LegacyFlag(
        "--recompute-activations",
        "The same as --recompute-granularity selective.",
        fixed("model", "recompute_granularity", "selective"),
    ),
    LegacyFlag(
        "--use-rotary-position-embeddings",
        "Old name of --position-embedding-type rope.",
        fixed("gpt", "position_embedding_type", "rope"),
        "--use-rotary-position-embeddings is an old name: it sets --position-embedding-type rope",
    ),
    LegacyFlag(
        "--window-size",
        "Megatron's name of --sliding-window: LEFT,0 is a window of LEFT + 1 tokens.",
        _window,
        "--window-size LEFT,0 sets --sliding-window LEFT + 1, which counts the token itself",
        WORD,
    ),
    LegacyFlag(
        "--no-pad-vocab-size",
        "The same as --make-vocab-size-divisible-by 1.",
        fixed("tokenizer", "make_vocab_size_divisible_by", 1),
    ),
    LegacyFlag(
        "--disable-pad-vocab-size",
        "The same as --make-vocab-size-divisible-by 1.",
        fixed("tokenizer", "make_vocab_size_divisible_by", 1),
    ),
    LegacyFlag(
        "--use-torch-fsdp2",
        "Megatron's name of --data-parallel-sharding-strategy optim_grads_params.",
        _fully_sharded,
        "--use-torch-fsdp2 sets --data-parallel-sharding-strategy optim_grads_params",
    ),
    LegacyFlag(
        "--use-megatron-fsdp",
        "Megatron's switch for --data-parallel-sharding-strategy, optim_grads_params by default.",
        _fully_sharded,
        "--use-megatron-fsdp sets --data-parallel-sharding-strategy",
        yields=("data_parallel_sharding_strategy",),
    ),
    LegacyFlag(
        "--grad-reduce-in-bf16",
        "Accumulate and reduce gradients in the parameters' data type (bf16 or fp16).",
        fixed("ddp", "grad_reduce_in_fp32", False),
    ),
    LegacyFlag(
        "--use-precision-aware-optimizer",
        "Megatron's switch for low-precision optimizer state, which needs none here.",
        note="--use-precision-aware-optimizer has no effect: the dtypes of main gradients and "
        "moments are taken as given, at every ZeRO stage",
    ),
    LegacyFlag(
        "--cpu-optimizer",
        "Older name of --optimizer-cpu-offload.",
        fixed("optimizer", "optimizer_cpu_offload", True),
        "--cpu-optimizer is an old name: it sets --optimizer-cpu-offload",
    ),
    LegacyFlag(
        "--muon-no-split-qkv",
        "Older name of --no-muon-split-qkv.",
        fixed("optimizer", "muon_split_qkv", False),
    ),
)

_ONE_CHOICE = (
    LegacyFlag(
        "--data-impl",
        "Only mmap files exist; accepted so that old commands run.",
        note="--data-impl has no effect: data files are always the mmap kind",
        options=WORD,
        only=("mmap", "infer", "cached"),
        otherwise="data files are of the mmap kind; make them with tools/preprocess_data.py",
    ),
    LegacyFlag(
        "--dataset-impl",
        "Only mmap files exist; accepted so that old commands run.",
        note="--dataset-impl has no effect: data files are always the mmap kind",
        options=WORD,
        only=("mmap",),
        otherwise="data files are of the mmap kind",
    ),
    LegacyFlag(
        "--transformer-impl",
        "Only the local implementation exists.",
        note="--transformer-impl local has no effect: it is the only one",
        options=WORD,
        only=("local",),
        otherwise="there is one implementation, in plain PyTorch; drop the flag",
    ),
    LegacyFlag(
        "--spec",
        "Only the local layers exist.",
        note="--spec local has no effect: it is the only one",
        options=WORD,
        only=("local",),
        otherwise="layers are not put together from modules by name; write a model of your own "
        "as examples/custom_model.py does",
    ),
    LegacyFlag(
        "--ckpt-format",
        "mcore writes one format, which every layout reads.",
        note="--ckpt-format has no effect: checkpoints are always written in mcore's own format",
        options=WORD,
        only=("torch_dist", "torch", "torch_dcp", "fsdp_dtensor"),
        otherwise="there is one format; `mcore convert` reads Megatron's",
    ),
    LegacyFlag(
        "--attention-backend",
        "Attention always takes torch's fastest kernel.",
        note="--attention-backend has no effect: attention always takes torch's fastest kernel",
        options=WORD,
        only=("auto", "flash", "fused", "unfused", "local"),
        otherwise="torch chooses among its own kernels",
    ),
    LegacyFlag(
        "--cross-entropy-fusion-impl",
        "The native implementation is the only one.",
        note="--cross-entropy-fusion-impl native has no effect: it is the only one",
        options=WORD,
        only=("native",),
        otherwise="--cross-entropy-loss-fusion computes output layer and loss together",
    ),
    LegacyFlag(
        "--megatron-fsdp-version",
        "Sharding is PyTorch's own.",
        note="--megatron-fsdp-version has no effect: sharding is PyTorch's own fully_shard",
        options=NUMBER,
    ),
    LegacyFlag(
        "--outer-dp-sharding-strategy",
        "Hybrid sharding is --num-distributed-optimizer-instances.",
        note="--outer-dp-sharding-strategy no_shard has no effect: copies are always whole",
        options=WORD,
        only=("no_shard",),
        otherwise="hybrid sharding keeps whole copies; --num-distributed-optimizer-instances says "
        "how many",
    ),
    LegacyFlag(
        "--empty-unused-memory-level",
        "Cached device memory is kept.",
        note="--empty-unused-memory-level 0 has no effect: cached memory is always kept",
        options=NUMBER,
        only=(0,),
        otherwise="cached device memory is never given back between steps; drop it",
    ),
    LegacyFlag(
        "--dist-ckpt-strictness",
        "A load takes everything or fails.",
        note="--dist-ckpt-strictness has no effect: a load takes everything that the run needs, "
        "or fails",
        options=WORD,
        only=("assume_ok_unexpected", "raise_unexpected", "raise_all"),
        otherwise="nothing is loaded in part without saying so; --finetune takes weights alone",
    ),
    LegacyFlag(
        "--muon-scalar-optimizer",
        "What updates all but the weight matrices: adam.",
        note="--muon-scalar-optimizer adam has no effect: it is the only one",
        options=WORD,
        only=("adam",),
        otherwise="Adam updates what is no weight matrix",
    ),
    *(
        LegacyFlag(
            flag,
            "Megatron's report of spikes: the same as --loss-spike-policy report.",
            fixed("stability", "loss_spike_policy", "report"),
            f"{flag} sets --loss-spike-policy report, whose limits are its own",
            yields=("loss_spike_policy",),
        )
        for flag in ("--check-for-spiky-loss", "--check-for-large-grads")
    ),
)

_ALWAYS_SO = (
    no_effect("--use-mcore-models", "there is one set of models"),
    no_effect("--use-flash-attn", "attention always takes torch's fastest kernel"),
    no_effect("--calculate-per-token-loss", "the loss is always per token of the global batch"),
    no_effect(
        "--accumulate-allreduce-grads-in-fp32", "gradients are always accumulated in float32"
    ),
    no_effect("--attention-softmax-in-fp32", "softmax is always taken in float32 at least"),
    no_effect("--no-query-key-layer-scaling", "it is never applied"),
    no_effect("--use-cpu-initialization", "initial weights never depend on the device or layout"),
    no_effect("--init-model-with-meta-device", "weights are made where they are kept"),
    no_effect("--no-async-tensor-model-parallel-allreduce", "overlap never changes the numbers"),
    *(
        no_effect(f"--{switch}-overlap-p2p-communication", "receives are always posted ahead")
        for switch in ("no", "disable")
    ),
    no_effect("--overlap-p2p-communication-warmup-flush", "receives are always posted ahead"),
    *(
        no_effect(f"--{switch}-align-{what}", "stages never wait for each other there")
        for switch in ("no", "disable")
        for what in ("param-gather", "grad-reduce")
    ),
    *(
        no_effect(flag, "one kind of process group is made, that of the backend")
        for flag in ("--disable-gloo-process-groups", "--no-use-gloo-process-groups")
    ),
    no_effect(
        "--ddp-average-in-collective",
        "gradients are summed and divided once, by the tokens of the global batch",
    ),
    no_effect(
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "buckets are padded to the data-parallel size, which numbers do not depend on",
    ),
    *(
        no_effect(f"--{switch}-{what}-fusion", "torch chooses its kernels by itself")
        for switch in ("no", "disable")
        for what in _FUSIONS
    ),
    *(
        no_effect(f"--{switch}-persist-layer-norm", "torch chooses its kernels by itself")
        for switch in ("no", "disable")
    ),
)

_DATA_AND_CHECKPOINTS = (
    no_effect("--data-cache-path", "sample order is computed; there are no index files", WORD),
    *(
        no_effect(flag, "sample order is computed; there are no index files")
        for flag in ("--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap")
    ),
    no_effect("--num-dataset-builder-threads", "there are no index files to build", NUMBER),
    no_effect(
        "--mid-level-dataset-surplus",
        "a blend takes from each corpus exactly what it deals",
        {"type": float, "metavar": "X"},
    ),
    *(
        no_effect(
            f"--{switch}-create-attention-mask-in-dataloader",
            "masks are made inside attention, never in the loader",
        )
        for switch in ("no", "disable")
    ),
    no_effect("--use-dist-ckpt", "checkpoints are always distributed"),
    no_effect("--dist-ckpt-format", "there is one format of checkpoints", WORD),
    no_effect("--auto-detect-ckpt-format", "there is one format; `mcore convert` reads others"),
    *(
        no_effect(flag, "all ranks share the writing and the reading")
        for flag in (
            "--ckpt-fully-parallel-save",
            "--ckpt-fully-parallel-load",
            "--no-ckpt-fully-parallel-save",
        )
    ),
    *(
        no_effect(flag, "every checkpoint loads at every layout, optimizer included")
        for flag in (
            "--dist-ckpt-optim-fully-reshardable",
            "--distrib-optim-fully-reshardable-mem-efficient",
            "--ckpt-assume-constant-structure",
        )
    ),
    no_effect("--dist-ckpt-workers", "a checkpoint is written by one thread a rank", NUMBER),
    no_effect("--use-persistent-ckpt-worker", "--async-save writes in a thread"),
    no_effect("--async-strategy", "--async-save writes in one way", WORD),
    no_effect(
        "--verify-integrity", "checksums are always checked as a checkpoint is read, never skipped"
    ),
    no_effect("--exit-signal-handler", "signals save and exit unless --no-exit-signal-handler"),
    no_effect("--log-validation-ppl-to-tensorboard", "the perplexity is always written"),
    *(
        no_effect(flag, "TensorBoard gets every figure of the log line")
        for flag in (
            "--no-log-learning-rate-to-tensorboard",
            "--no-log-loss-scale-to-tensorboard",
            "--log-batch-size-to-tensorboard",
        )
    ),
)

LEGACY: dict[str, LegacyFlag] = by_name(
    (*_RENAMED, *_ONE_CHOICE, *_ALWAYS_SO, *_DATA_AND_CHECKPOINTS, *DEEPSPEED_FLAGS)
)

_NOT_BUILT: Mapping[str, tuple[str, ...]] = {
    "energy is not measured; --log-hardware shows the load of the GPUs": ("--log-energy",),
    "Muon's products have the main parameters' precision; drop it": ("--muon-fp32-matmul-prec",),
}


def refused_flags() -> dict[str, str]:
    """Known flags of Megatron and DeepSpeed that mcore lacks, with what to do instead."""
    both = (*REFUSED.items(), *_NOT_BUILT.items())
    return {flag: reason for reason, flags in both for flag in flags}
