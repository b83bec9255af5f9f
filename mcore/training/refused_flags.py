"""Flags of Megatron and Megatron-DeepSpeed that mcore lacks: the reason, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

#: A reason -> the flags that it refuses.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "the warmup is --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction": ("--warmup",),
    "options come from --config FILE.yaml, with the names of the flags": ("--yaml-cfg",),
    "a checkpoint loads at every layout: give the sizes that you want": (
        "--use-mp-args-from-checkpoint-args",
    ),
    # parallelism
    "weight gradients are computed late by --pipeline-schedule zb-h1 or zb-v": (
        "--defer-embedding-wgrad-compute",
        "--wgrad-deferral-limit",
    ),
    "this way of overlapping needs transformer-engine, which mcore does not use; drop it": (
        "--tp-comm-overlap",
        "--tp-comm-overlap-cfg",
        "--tp-comm-overlap-ag",
        "--tp-comm-overlap-rs",
        "--tp-comm-overlap-rs-dgrad",
        "--tp-comm-bulk-dgrad",
        "--tp-comm-bulk-wgrad",
        "--disable-tp-comm-overlap-ag",
        "--disable-tp-comm-overlap-rs",
        "--disable-tp-comm-bulk-dgrad",
        "--disable-tp-comm-bulk-wgrad",
    ),
    "sequences are not split over context-parallel or DeepSpeed's sequence-parallel ranks; "
    "--sequence-parallel splits them over tensor-parallel ranks": (
        "--cp-comm-type",
        "--hierarchical-context-parallel-sizes",
        "--hybrid-context-parallel",
        "--max-seqlen-per-dp-cp-rank",
        "--force-ds-sequence-parallel",
        "--ds-sequence-parallel-fpdt",
        "--ds-sequence-parallel-fpdt-chunk-size",
        "--ds-sequence-parallel-fpdt-offloading",
    ),
    "one timeout holds from the start: --distributed-timeout-minutes": (
        "--distributed-timeout-seconds-after-init",
    ),
    "NCCL is tuned by its environment variables; drop it": (
        "--nccl-communicator-config-path",
        "--use-sharp",
        "--high-priority-stream-groups",
    ),
    "`mcore check --world-size N` examines a large run without starting it": (
        "--fake-process-group",
    ),
    "an embedding stage of its own is --pipeline-model-parallel-layout 'E|t...|L'": (
        "--standalone-embedding-stage",
    ),
    # data parallelism
    "parameters are gathered with the next forward: --overlap-param-gather": (
        "--overlap-param-gather-with-optimizer-step",
    ),
    "gradients are reduced in float32 unless --grad-reduce-in-bf16 is given; drop both": (
        "--ddp-reduce-scatter-with-fp32-accumulation",
    ),
    "parameters stay gathered with --data-parallel-sharding-strategy optim_grads": (
        "--torch-fsdp2-no-reshard-after-forward",
    ),
    # model
    "every layer has rotary positions, or none has (--position-embedding-type)": (
        "--no-rope-freq",
    ),
    "the window is that of all layers from --sliding-window-first-layer on": (
        "--window-attn-skip-freq",
    ),
    "norms have plain weights, not weights around zero; drop it": ("--apply-layernorm-1p",),
    "activations are GELU, --openai-gelu and --swiglu": ("--squared-relu", "--quick-geglu"),
    "queries and keys are normalised by --qk-layernorm": (
        "--qk-l2-norm",
        "--qk-clip",
        "--qk-clip-alpha",
        "--qk-clip-threshold",
    ),
    "initial weights are normal, of --init-method-std; drop it": (
        "--init-method-xavier-uniform",
        "--use-mup",
        "--mup-base-hidden-size",
        "--mup-base-head-dim",
        "--mup-embedding-mult",
        "--mup-output-mult",
        "--mup-attn-scale-power",
    ),
    "attention scores are computed in float32 at least and need no such scaling; drop it": (
        "--apply-query-key-layer-scaling",
    ),
    "the vocabulary is padded to a multiple of --make-vocab-size-divisible-by": (
        "--padded-vocab-size",
    ),
    "mcore always initialises its weights; drop it": ("--no-initialization",),
    "low precision below 16 bits needs transformer-engine, which mcore does not use; drop it": (
        "--fp8-format",
        "--fp8-recipe",
        "--fp8-param-gather",
        "--fp4-format",
        "--first-last-layers-bf16",
    ),
    "the loss is always taken in float32; drop it": ("--fp16-lm-cross-entropy",),
    "activations are recomputed (--recompute-granularity) or kept in host memory by layer "
    "(--cpu-offloading-num-layers)": (
        "--fine-grained-activation-offloading",
        "--offload-modules",
        "--checkpoint-in-cpu",
    ),
    "mixture-of-experts models are not built; drop it": (
        "--num-experts",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
        "--moe-router-topk",
        "--moe-grouped-gemm",
        "--moe-aux-loss-coeff",
        "--moe-expert-parallel-size",
        "--create-moe-param-group",
        "--enable-expert-tensor-parallelism",
        "--expert-interval",
        "--mlp-type",
        "--topk",
        "--use-tutel",
        "--moe-loss-coeff",
        "--moe-train-capacity-factor",
        "--moe-eval-capacity-factor",
        "--moe-min-capacity",
        "--disable-moe-token-dropping",
    ),
    # optimizer and training
    "norms, those of queries and keys among them, do not decay; drop it": (
        "--apply-wd-to-qk-layernorm",
    ),
    "all data-parallel copies start from the same weights; drop it": (
        "--data-parallel-random-init",
    ),
    "evaluation alone is --skip-train": ("--freeze-all-layers",),
    "training is measured in samples: --train-samples, --lr-decay-samples, --lr-warmup-samples, "
    "which are tokens / --seq-length": (
        "--train-tokens",
        "--lr-decay-tokens",
        "--lr-warmup-tokens",
    ),
    "the length of training is --train-samples, for N epochs N x the samples of one": (
        "--train-data-exact-num-epochs",
    ),
    "curricula and token dropping are not built; --step-batch-size-schedule lets the batch grow": (
        "--curriculum-learning",
        "--curriculum-learning-legacy",
        "--data-efficiency-curriculum-learning",
        "--random-ltd",
    ),
    "large matrices are split by --tensor-model-parallel-size": (
        "--memory-centric-tiled-linear",
        "--tile-factor",
    ),
    "distillation is not built; drop it": (
        "--kd",
        "--kd-alpha-ce",
        "--kd-beta-ce",
        "--kd-temp",
        "--num-layers-teacher",
        "--hidden-size-teacher",
        "--num-attention-heads-teacher",
        "--load-teacher",
    ),
    # data
    "there is no made-up data; tools/preprocess_data.py makes a corpus of any text file": (
        "--mock-data",
    ),
    "data files are read from a file system; mount or copy the bucket": (
        "--object-storage-cache-path",
    ),
    "documents are kept apart by --reset-attention-mask, with --reset-position-ids": (
        "--dataloader-inter-document-masking",
    ),
    "filling in the middle is not built; drop it": (
        "--fim-data",
        "--fim-rate",
        "--fim-spm-rate",
        "--fim-split-sample",
        "--fim-fragment-rate",
        "--fim-no-prefix",
        "--fim-prefix-token",
        "--fim-middle-token",
        "--fim-suffix-token",
        "--fim-pad-token",
        "--fim-eod-token",
    ),
    "special tokens are those of the tokenizer's own files": ("--tokenizer-special-tokens",),
    "tokenizers are data: no code of theirs is ever run": ("--trust-remote-code",),
    "chats are written as --sft-tokenizer-prompt-format says": ("--chat-template",),
    # checkpoints
    "start from other weights with --load DIR --finetune, then continue with --load SAVE": (
        "--pretrained-checkpoint",
    ),
    "an older checkpoint is taken by --ckpt-step N": ("--override-ckpt-iteration",),
    "checkpoints that are soon deleted are --save-interval with --keep-latest and --keep-every": (
        "--non-persistent-save-interval",
        "--non-persistent-ckpt-type",
        "--non-persistent-global-ckpt-dir",
        "--non-persistent-local-ckpt-dir",
        "--non-persistent-local-ckpt-algo",
        "--replication",
        "--replication-jump",
        "--replication-factor",
    ),
    "`mcore convert` reads and writes other formats": (
        "--ckpt-convert-format",
        "--ckpt-convert-save",
    ),
    "main parameters are part of the optimizer's state, which --load takes": (
        "--load-main-params-from-ckpt",
    ),
    # watching
    "hardware is tested by running `mcore selftest` before the job": ("--gpu-sniff-test-interval",),
    "stragglers are reported in the log, by --log-straggler alone; drop it": (
        "--straggler-ctrlr-port",
        "--straggler-minmax-count",
    ),
    "faults are not injected; drop it": ("--error-injection-rate", "--error-injection-type"),
    "a step whose second computation differs is told in --autopilot-log; drop it": (
        "--result-rejected-tracker-filename",
    ),
    "the phases of a step are timed by --timing-log-level": ("--profile-backward",),
    "the profiled steps are --profile-step-start and --profile-step-end": ("--profile_steps",),
    "jobs continue by their --save directory: start the same command again, with --load": (
        "--adlr-autoresume",
        "--adlr-autoresume-interval",
        "--enable-ft-package",
        "--inprocess-restart",
    ),
}
