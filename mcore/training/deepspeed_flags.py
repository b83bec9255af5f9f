"""Megatron-DeepSpeed's flags: mapped to a field or noted. The JSON file is `mcore.deepspeed`'s."""

from __future__ import annotations

from typing import Any

from mcore.config.distributed import STRATEGIES
from mcore.training.legacy_flag import (
    NUMBER,
    REAL,
    WORD,
    LegacyFlag,
    Settings,
    alias,
    fixed,
    no_effect,
    to,
)


def _zero_stage(value: Any) -> Settings:
    return {("ddp", "data_parallel_sharding_strategy"): STRATEGIES[value]}


_MAPPED = (
    LegacyFlag(
        "--zero-stage",
        "DeepSpeed's name of --data-parallel-sharding-strategy: 0 to 3.",
        _zero_stage,
        "--zero-stage is DeepSpeed's name: it sets --data-parallel-sharding-strategy",
        {"type": int, "choices": [0, 1, 2, 3]},
    ),
    LegacyFlag(
        "--overlap-comm",
        "DeepSpeed's name of --overlap-grad-reduce.",
        fixed("ddp", "overlap_grad_reduce", True),
        "--overlap-comm is DeepSpeed's name: it sets --overlap-grad-reduce",
    ),
    *(
        LegacyFlag(
            flag,
            "DeepSpeed's name of --ddp-bucket-size, in elements.",
            to("ddp", "bucket_size"),
            f"{flag} is DeepSpeed's name: it sets --ddp-bucket-size",
            NUMBER,
        )
        for flag in (
            "--reduce-scatter-bucket-size",
            "--allgather-bucket-size",
            "--zero-reduce-bucket-size",
            "--zero-allgather-bucket-size",
        )
    ),
    LegacyFlag(
        "--rotary-position-embeddings-theta",
        "Megatron-DeepSpeed's name of --rotary-base.",
        to("gpt", "rotary_base"),
        None,
        REAL,
    ),
    LegacyFlag(
        "--num-key-value-heads",
        "Megatron-DeepSpeed's name of --num-query-groups; needs no --group-query-attention.",
        to("model", "num_query_groups"),
        None,
        NUMBER,
    ),
    alias(
        "--checkpoint-num-layers",
        "model",
        "recompute_num_layers",
        "--recompute-num-layers",
        NUMBER,
    ),
    *(
        LegacyFlag(
            flag,
            "Another name of --distribute-saved-activations.",
            fixed("model", "distribute_saved_activations", True),
            f"{flag} is another name: it sets --distribute-saved-activations",
        )
        for flag in ("--partition-activations", "--distribute-checkpointed-activations")
    ),
    *(
        LegacyFlag(
            flag,
            "The same as --pipeline-schedule zb-h1.",
            fixed("pipeline", "pipeline_schedule", "zb-h1"),
            f"{flag} sets --pipeline-schedule zb-h1, which updates as any other schedule does",
        )
        for flag in ("--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics")
    ),
    LegacyFlag(
        "--no-pipeline-parallel",
        "The same as --pipeline-model-parallel-size 1.",
        fixed("model", "pipeline_model_parallel_size", 1),
        "--no-pipeline-parallel means --pipeline-model-parallel-size 1, the default",
    ),
)

_ONE_CHOICE = (
    LegacyFlag(
        "--remote-device",
        "Parameters stay on the device.",
        note="--remote-device none has no effect: parameters always stay on the device",
        options=WORD,
        only=("none",),
        otherwise="parameters stay on the device; share them out with "
        "--data-parallel-sharding-strategy optim_grads_params",
    ),
    LegacyFlag(
        "--ds-sequence-parallel-size",
        "Context parallelism is not built.",
        note="--ds-sequence-parallel-size 1 has no effect: it is the only size",
        options=NUMBER,
        only=(1,),
        otherwise="data-parallel ranks do not share sequences; --sequence-parallel splits them "
        "over tensor-parallel ranks",
    ),
    LegacyFlag(
        "--DDP-impl",
        "Data parallelism is of one kind.",
        note="--DDP-impl has no effect: data parallelism is of one kind",
        options=WORD,
        only=("local", "torch"),
        otherwise="there is one kind, and --data-parallel-sharding-strategy for sharding",
    ),
)

_ALWAYS_SO = (
    no_effect("--zero-reduce-scatter", "sharded gradients are always reduce-scattered"),
    no_effect("--zero-contigious-gradients", "gradients always lie in contiguous buffers"),
    no_effect("--cpu_torch_adam", "there is one Adam, PyTorch's or an equal one"),
    no_effect("--ds_fused_adam", "there is one Adam, PyTorch's or an equal one"),
    no_effect(
        "--deepspeed-activation-checkpointing",
        "recomputation is mcore's own: --recompute-granularity",
    ),
    no_effect("--contigious-checkpointing", "the allocator keeps recomputed inputs together"),
    no_effect("--synchronize-each-layer", "layers are never waited for"),
    no_effect("--universal-checkpoint", "every checkpoint loads at every layout"),
    *(
        no_effect(f"--use-flash-attn-{kind}", "attention always takes torch's fastest kernel")
        for kind in ("v1", "v2", "triton", "builder")
    ),
)

DEEPSPEED_FLAGS: tuple[LegacyFlag, ...] = (*_MAPPED, *_ONE_CHOICE, *_ALWAYS_SO)
