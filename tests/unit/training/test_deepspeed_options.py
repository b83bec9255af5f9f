"""A run configured by a DeepSpeed file is the run that flags configure."""

import contextlib
import dataclasses
import json
import math

import pytest

from mcore.config.fields import problems_of
from mcore.deepspeed import translate
from mcore.deepspeed.keys import ACTIVATION_CHECKPOINTING, BF16, FP16, TOP, ZERO
from mcore.deepspeed.recipes import _OPTIMIZERS, _SCHEDULERS
from mcore.errors import ConfigError
from mcore.training.arguments import read
from mcore.training.initialize import Launch
from mcore.training.prepare import prepare, settle_options

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --train-iters 50 "
    "--tokenizer-type NullTokenizer --vocab-size 100 --data-path corpus"
)
FILE = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": 1e-4,
            "warmup_num_steps": 5,
            "total_num_steps": 50,
            "warmup_type": "linear",
        },
    },
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e7,
        "allgather_bucket_size": 5e7,
        "overlap_comm": True,
    },
    "activation_checkpointing": {"partition_activations": True},
}
FLAGS = (
    "--global-batch-size 32 --micro-batch-size 2 --fp16 --initial-loss-scale 4096 "
    "--loss-scale-window 500 --lr 1e-4 --adam-beta2 0.95 --weight-decay 0.1 --min-lr 0 "
    "--lr-decay-style linear --lr-warmup-iters 5 --lr-decay-iters 50 --clip-grad 0.5 "
    "--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 50000000 "
    "--overlap-grad-reduce --overlap-param-gather --distribute-saved-activations"
)
LAYOUT = "--tensor-model-parallel-size 2 --checkpoint-activations"


@pytest.fixture
def settled(tmp_path):
    def settle(config, words="", world_size=8):
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(config))
        line = f"{MODEL} {LAYOUT} {words} --deepspeed --deepspeed_config {path}"
        return settle_options(read(line.split()), world_size)

    return settle


def test_file_and_flags_give_the_same_configuration(settled):
    from_flags = settle_options(read(f"{MODEL} {LAYOUT} {FLAGS}".split()), 8)
    from_file = settled(FILE)
    assert from_file.config == from_flags.config
    assert from_file.config.fingerprint() == from_flags.config.fingerprint()
    # What both give must agree, and does.
    assert settled(FILE, FLAGS).config == from_flags.config


def test_auto_is_what_the_command_line_says(settled):
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "fp16": {"enabled": "auto", "initial_scale_power": 12, "loss_scale_window": 500},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
                "warmup_type": "linear",
            },
        },
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": "auto",
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": "auto",
        },
    }
    assert settled(auto, FLAGS).config == settled(FILE, FLAGS).config


def test_origins_are_known(settled):
    result = settled(FILE, "--lr 1e-4")
    source = result.arguments.source("optimizer", "adam_beta2")
    assert source.kind == "DeepSpeed JSON"
    assert source.spelled.startswith("optimizer.params.betas in ")
    assert result.arguments.source("optimizer", "lr").spelled == "--lr"


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        ("--lr 1e-3", ["optimizer.params.lr", "--lr 0.0001", "--lr gives 0.001"]),
        ("--micro-batch-size 4", ["train_micro_batch_size_per_gpu", "2", "gives 4"]),
        ("--zero-stage 1", ["zero_optimization.stage", "optim_grads", "--zero-stage gives optim"]),
        ("--bf16", ["--bf16 and --fp16 exclude each other", "fp16.enabled in"]),
        ("--ddp-bucket-size 7", ["zero_optimization.reduce_bucket_size", "50000000", "gives 7"]),
    ],
)
def test_disagreement_is_refused_with_both_origins(settled, words, fragments):
    with pytest.raises(ConfigError) as caught:
        settled(FILE, words)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_everything_wrong_is_told_together(settled):
    wrong = {**FILE, "elasticity": {"enabled": True}, "gradient_cliping": 1.0}
    with pytest.raises(ConfigError) as caught:
        settled(wrong, "--min-lr 3 --hidden-siz 3")
    told = str(caught.value)
    for fragment in (
        "elasticity",
        "gradient_cliping is no key that mcore reads; did you mean gradient_clipping?",
        "unknown flag '--hidden-siz'",
        "optimizer.params",
    ):
        assert fragment in told


def test_the_switch_needs_the_file():
    (problem,) = read(["--deepspeed"]).problems
    assert "--deepspeed_config FILE" in problem


def test_a_file_that_cannot_be_read_is_a_problem_beside_others():
    with pytest.raises(ConfigError) as caught:
        settle_options(read(f"{MODEL} --lr 1 --seed 0 --deepspeed_config absent.json".split()), 1)
    assert "absent.json cannot be read" in str(caught.value)
    assert "--seed is 0" in str(caught.value)


def test_a_warmup_beyond_the_end_is_told_by_its_key(settled):
    params = {"warmup_max_lr": 1e-4, "warmup_num_steps": 1000, "warmup_type": "linear"}
    config = {**FILE, "scheduler": {"type": "WarmupLR", "params": params}}
    with pytest.raises(ConfigError) as caught:
        settled(config)
    assert "the warmup (1000, from --lr-warmup-iters) must be shorter" in str(caught.value)
    key = "scheduler.params.warmup_num_steps"
    assert f"(--lr-warmup-iters 1000 comes from {key} in " in str(caught.value)


TRIANGLE = {"train_batch_size": 33, "train_micro_batch_size_per_gpu": 2}


@pytest.mark.parametrize(
    ("text", "words", "number"),
    [
        (json.dumps(TRIANGLE), "--lr 1", 1),
        (json.dumps({**TRIANGLE, "train_batch_size": 0}), "--lr 1", 1),
        (json.dumps({"gradient_accumulation_steps": 2}), "--lr 1", 1),
        (json.dumps({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}),
         "--micro-batch-size 1", 1),
        ("{", "", 1),
        ("[]", "--seed 0", 2),
        ("{", "--lr 1 --min-lr 2", 2),
    ],
)  # fmt: skip
def test_what_a_faulty_file_was_to_give_is_not_missing(tmp_path, text, words, number):
    path = tmp_path / "ds.json"
    path.write_text(text)
    line = f"{MODEL} {words} --deepspeed_config {path}"
    with pytest.raises(ConfigError) as caught:
        settle_options(read(line.split()), 1)
    assert len(problems_of(caught.value)) == number
    assert "missing" not in str(caught.value)


def test_what_no_file_was_to_give_is_missing(settled):
    with pytest.raises(ConfigError, match="missing: --lr"):
        settled(TRIANGLE)


def test_the_file_is_kept_with_the_values_of_the_run(tmp_path, monkeypatch):
    """Read again without the command line's values, it gives the same configuration."""
    monkeypatch.chdir(tmp_path)
    auto = {
        **FILE,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "fp16": {**FILE["fp16"], "enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto",
                              "stage3_prefetch_bucket_size": "auto"},
    }  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(auto))
    save = "--save out --save-interval 5 --device cpu"
    words = f"{MODEL} {LAYOUT} {FLAGS} {save} --deepspeed_config ds.json"
    first = prepare(read(words.split()), Launch(0, 8, 0)).config
    kept = json.loads((tmp_path / "out" / "deepspeed_config.resolved.json").read_text())
    assert kept == {
        **FILE,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000, "overlap_comm": True},
    }
    again = f"{MODEL} {LAYOUT} {save} --min-lr 0 --distribute-saved-activations --deepspeed_config "
    line = f"{again} out/deepspeed_config.resolved.json"
    assert settle_options(read(line.split()), 8).config == first


#: As JSON has them, and as Python's reader of JSON gives them.
VALUES = [
    None, True, False, 0, 1, -1, 3, 1.5, -0.5, 1e300, math.inf, -math.inf, math.nan, 10**400,
    2**63, 2000, "", "auto", "cpu", "bf16", "1", [], [1], [0.1, 0.2], ["a", "b"], [math.inf, 1],
    {}, {"enabled": True}, {"device": "cpu"}, {"a": {"b": [1]}},
]  # fmt: skip
NO_WARMUP = {"warmup_type": "linear"}
WITHIN = {
    "": ({}, [*TOP, "train_batch_size", "train_micro_batch_size_per_gpu",
              "gradient_accumulation_steps", "fp16", "bf16", "bfloat16", "zero_optimization",
              "optimizer", "scheduler", "activation_checkpointing", "data_types"]),
    "zero_optimization": ({}, [*{key.split(".")[0] for key in ZERO}, "cpu_offload",
                               "cpu_offload_param", "cpu_offload_use_pin_memory"]),
    "zero_optimization.offload_optimizer": ({}, ["device", "ratio", "pin_memory"]),
    "fp16": ({"enabled": True}, ["enabled", *FP16]),
    "bf16": ({"enabled": True}, ["enabled", *BF16]),
    "activation_checkpointing": ({}, ["partition_activations", *ACTIVATION_CHECKPOINTING]),
    "data_types": ({}, ["grad_accum_dtype"]),
    "optimizer": ({"type": "Adam"}, ["type", "params", "legacy_fusion"]),
    "scheduler": ({"type": "WarmupLR", "params": NO_WARMUP}, ["type", "params"]),
    **{f"optimizer.params {kind}": ({"type": kind}, list(rules))
       for kind, (_, rules) in _OPTIMIZERS.items()},
    **{f"scheduler.params {kind}": ({"type": kind}, list(rules))
       for kind, (_, rules, _) in _SCHEDULERS.items()},
}  # fmt: skip


def config_with(place, key, value):
    """A file in which one key has a value."""
    base, _ = WITHIN[place]
    path, _, kind = place.partition(" ")
    if kind:
        block = path.partition(".")[0]
        params = {**(NO_WARMUP if block == "scheduler" else {}), key: value}
        return {block: {**base, "params": params}}
    inner = {**base, key: value}
    for name in reversed(path.split(".") if path else []):
        inner = {name: inner}
    return inner


@pytest.mark.parametrize("place", WITHIN)
def test_any_value_at_any_key_acts_or_is_refused(tmp_path, place):
    path = tmp_path / "ds.json"
    base = f"{MODEL} --micro-batch-size 1 --lr 1 --pipeline-model-parallel-size 1"
    arguments = dataclasses.replace(read(base.split()), deepspeed=str(path))
    for key in WITHIN[place][1]:
        for value in VALUES:
            translated = translate(config_with(place, key, value), arguments_of(arguments), 1)
            assert all(place in problem for place, problem in _named(key, translated.problems))
            if not translated.problems and translated.settings:
                path.write_text(json.dumps(config_with(place, key, value)))
                with contextlib.suppress(ConfigError):
                    settle_options(arguments, 1)


def _named(key, problems):
    """What is refused is named by its key, but for two corners of the batch that do not fit."""
    name = key.removeprefix("cpu_")
    return [(name, problem) for problem in problems if "batch" not in key]


def arguments_of(arguments):
    return lambda section, field: arguments.typed[section].get(field)


@pytest.mark.parametrize(
    "text", ['{"gradient_clipping": 1e999}', '{"a": ' + "9" * 5000 + "}", "[" * 100_000]
)
def test_numbers_and_depths_beyond_all_bounds(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        settle_options(read(f"{MODEL} --lr 1 --deepspeed_config {path}".split()), 1)
