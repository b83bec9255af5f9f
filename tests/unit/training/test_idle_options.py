import pytest
import torch

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.distributed import DistributedDataParallelConfig
from mcore.config.run import RunConfig
from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError, OptionsError
from mcore.training.arguments import build_config, read
from mcore.training.idle_options import idle_options, remarks

ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}


def idle(model=None, **ddp):
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    config = RunConfig(
        model=TransformerConfig(**sizes, **(model or {})), ddp=DistributedDataParallelConfig(**ddp)
    )
    return [option for option, _ in idle_options(config)]


@pytest.mark.parametrize(
    ("model", "ddp", "wanted"),
    [
        ({}, {}, []),
        ({"sequence_parallel": True}, {}, ["--sequence-parallel"]),
        ({"recompute_modules": ("mlp",)}, {}, ["--recompute-modules"]),
        ({"recompute_modules": ("mlp",), "recompute_granularity": "selective"}, {}, []),
        (
            {},
            {"reshard_every_microbatch": True, "use_distributed_optimizer": True},
            ["--reshard-every-microbatch"],
        ),
        ({}, {"reshard_every_microbatch": True, **ZERO3}, ["--reshard-every-microbatch"]),
        (
            {"pipeline_model_parallel_size": 2},
            {"reshard_every_microbatch": True, **ZERO3},
            [],
        ),
        (
            {},
            {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 9, **ZERO3},
            ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size"],
        ),
        ({}, {"num_buckets": 2, **ZERO3}, ["--ddp-num-buckets"]),
        ({}, {"num_buckets": 2}, ["--ddp-num-buckets"]),
        ({}, {"num_buckets": 2, "overlap_grad_reduce": True}, []),
        ({}, {"num_buckets": 2, "data_parallel_sharding_strategy": "optim_grads"}, []),
        ({}, {"grad_reduce_in_fp32": False}, ["--grad-reduce-in-bf16"]),
        ({"params_dtype": torch.bfloat16}, {"grad_reduce_in_fp32": False}, []),
    ],
)
def test_what_has_no_effect_is_named(model, ddp, wanted):
    assert idle(model, **ddp) == wanted


@pytest.mark.parametrize(
    ("words", "told"),
    [("--fp16", False), ("--fp16 --grad-reduce-in-bf16", True), ("--grad-reduce-in-bf16", False)],
)
def test_reduction_in_float16_is_remarked(words, told):
    model = "--num-layers 2 --hidden-size 8 --num-attention-heads 2"
    config = build_config(read([*model.split(), *words.split()]))
    assert [remark.split(":")[0] for remark in remarks(config)] == (
        ["--grad-reduce-in-bf16 with --fp16"] if told else []
    )


def test_what_is_not_loaded_from_nowhere():
    sizes = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    spared = {"load_rng": False, "load_optim": False}
    for load, wanted in ((None, ["--no-load-optim", "--no-load-rng"]), ("folder", [])):
        config = RunConfig(
            model=TransformerConfig(**sizes), checkpoint=CheckpointConfig(load=load, **spared)
        )
        assert [option for option, _ in idle_options(config)] == wanted


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("--sgd-momentum 0.5 --lion-beta1 0.5", ["--sgd-momentum", "--lion-beta1"]),
        ("--optimizer sgd --sgd-momentum 0.5 --adam-beta1 0.5", ["--adam-beta1"]),
        ("--optimizer muon --adam-beta1 0.5 --muon-momentum 0.5", []),
        ("--initial-loss-scale 8 --hysteresis 3", ["--initial-loss-scale", "--hysteresis"]),
        ("--fp16 --initial-loss-scale 8 --hysteresis 3", []),
        ("--fp16 --loss-scale 8 --loss-scale-window 3", ["--loss-scale-window"]),
        ("--lr-wsd-decay-iters 5", ["--lr-wsd-decay-iters"]),
        ("--rotary-base 500 --rope-scaling-factor 4", ["--rotary-base", "--rope-scaling-factor"]),
        ("--position-embedding-type rope --rotary-base 500", []),
        ("--eval-iters 0 --full-validation", ["--full-validation"]),
        (
            "--profile-step-start 3 --memory-snapshot-path a",
            ["--profile-step-start", "--memory-snapshot-path"],
        ),
        ("--profile --profile-step-start 3", []),
        ("--train-iters 6 --profile --profile-step-start 5 --iterations-to-skip 2 5-9", []),
        ("--train-iters 6 --profile --profile-step-start 6 --iterations-to-skip 2 7 8-9",
         ["--iterations-to-skip 7", "--iterations-to-skip 8", "--profile"]),
        ("--loss-spike-max-skips 3", ["--loss-spike-max-skips"]),
        ("--loss-spike-max-skips 3 --grad-norm-skip-threshold 2", []),
        (
            "--loss-spike-threshold 3 --alert-timeout 5",
            ["--loss-spike-threshold", "--alert-timeout"],
        ),
        ("--loss-spike-policy skip --loss-spike-threshold 3", []),
        ("--profile-ranks 1", ["--profile-ranks"]),
        ("--record-memory-history --profile-ranks 1", []),
        ("--rerun-mode disabled", ["--rerun-mode"]),
        ("--loss-spike-policy skip --loss-spike-lr-dip-iters 5 --loss-spike-max-rollbacks 1",
         ["--loss-spike-max-rollbacks", "--loss-spike-lr-dip-iters"]),
        ("--loss-spike-policy rollback --loss-spike-max-rollbacks 1", []),
        ("--sliding-window-first-layer 1", ["--sliding-window-first-layer"]),
        ("--sft-tokenizer-prompt-format chatml --no-data-sharding",
         ["--sft-tokenizer-prompt-format", "--no-data-sharding"]),
        ("--sft --sft-tokenizer-prompt-format chatml", []),
        ("--dataloader-type cyclic --no-data-sharding", []),
        ("--lr-warmup-init 1e-5", ["--lr-warmup-init"]),
        ("--lr-warmup-init 1e-5 --lr-warmup-iters 2", []),
        ("--no-save-rng --overwrite-save --on-damaged-checkpoint error",
         ["--no-save-rng", "--overwrite-save", "--on-damaged-checkpoint"]),
        ("--save a --overwrite-save --load a --on-damaged-checkpoint error", []),
        ("--tensorboard-log-interval 5 --log-memory-to-tensorboard",
         ["--tensorboard-log-interval", "--log-memory-to-tensorboard"]),
        ("--tensorboard-dir a --tensorboard-log-interval 5", []),
        ("--exit-signal SIGINT --no-exit-signal-handler", ["--exit-signal"]),
        (
            "--sft --reset-position-ids --reset-attention-mask --eod-mask-loss --no-mmap-bin-files",
            [
                "--reset-position-ids",
                "--reset-attention-mask",
                "--eod-mask-loss",
                "--no-mmap-bin-files",
            ],
        ),
        ("--reset-position-ids --eod-mask-loss --no-mmap-bin-files", []),
        ("--fp32-residual-connection --distribute-saved-activations --recompute-granularity full "
         "--recompute-method block --recompute-num-layers 9",
         ["--recompute-num-layers beyond 1", "--distribute-saved-activations",
          "--fp32-residual-connection"]),
        ("--bf16 --fp32-residual-connection --recompute-granularity full --recompute-method block "
         "--recompute-num-layers 1", []),
        (
            "--sft --max-tokens-per-microbatch 8 --no-data-sharding --dataloader-type cyclic "
            "--num-workers 1",
            ["--dataloader-type", "--no-data-sharding", "--num-workers"],
        ),
    ],
)  # fmt: skip
def test_what_another_option_would_have_to_switch_on(words, idle):
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2"
    config = build_config(read(f"{model} {words}".split()))
    assert [option for option, _ in idle_options(config)] == idle


def test_what_one_data_parallel_rank_and_a_cpu_have_no_use_for():
    words = "--use-distributed-optimizer --check-weight-hash-across-dp-replicas-interval 5"
    words += " --optimizer-cpu-offload --cpu-offloading-num-layers 1"
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2"
    config = build_config(read(f"{model} {words}".split()))
    assert [option for option, _ in idle_options(config, 2)] == []
    assert [option for option, _ in idle_options(config, 1, on_cpu=True)] == [
        "--check-weight-hash-across-dp-replicas-interval",
        "--use-distributed-optimizer",
        "--optimizer-cpu-offload",
        "--cpu-offloading-num-layers",
    ]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "flag", ["--lr", "--clip-grad", "--weight-decay", "--init-method-std", "--loss-scale"]
)
def test_what_is_no_number_is_refused_by_its_flag(flag, value):
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2"
    with pytest.raises(ConfigError, match=f"{flag} is {value}; use a finite number"):
        build_config(read([*model.split(), f"{flag}={value}"]))


def test_numbers_that_no_model_can_have():
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2"
    words = "--norm-epsilon=-1 --init-method-std=-1 --rotary-base 0"
    with pytest.raises(OptionsError) as info:
        build_config(read(f"{model} {words}".split()))
    assert len(info.value.problems) == 3
