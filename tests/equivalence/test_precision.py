"""Low precision: fp16 with dynamic loss scaling, bf16 beside fp32, at several ZeRO stages."""

import pytest
import torch

from mcore.errors import ConfigError, NumericsError
from tests.equivalence.program import (
    Layout,
    largest_difference,
    series,
    train,
    train_and_inspect,
    without_rates,
)
from tests.equivalence.tiny import command

SMALL = "--num-layers 2 --hidden-size 16 --seq-length 8"
LOW_STATE = "--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
FP16 = f"{SMALL} --fp16 --loss-scale-window 4 --hysteresis 2"


@pytest.fixture(scope="module")
def fp32(corpus):
    return train(command(corpus, 6, SMALL), Layout(dp=2))


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--bf16 --zero-stage 1 --overlap-param-gather",
        "--bf16 --zero-stage 2 --grad-reduce-in-bf16",
        "--bf16 --zero-stage 3 --fp32-residual-connection --recompute-activations",
        "--fp16 --initial-loss-scale 1024 --zero-stage 3",
        "--fp16 --loss-scale 512 --zero-stage 2",
        f"--bf16 --zero-stage 1 {LOW_STATE}",
        "--bf16 --fp32-residual-connection --normalization RMSNorm --swiglu --ffn-hidden-size 32",
    ],
)
def test_low_precision_follows_fp32(corpus, fp32, flags):
    if "RMSNorm" in flags:
        fp32 = train(command(corpus, 6, SMALL, flags.replace("--bf16", "")), Layout(dp=2))
    records = train(command(corpus, 6, SMALL, flags), Layout(dp=2))
    assert largest_difference(records, fp32) <= 2e-2
    assert largest_difference(records, fp32) > 0
    assert not any(series(records, "skipped"))


def expected_scales(scale, skipped, window, hysteresis):
    """Megatron's rule, step by step; returns the scale that each iteration used."""
    scales, good, left = [], 0, hysteresis
    for bad in skipped:
        scales.append(scale)
        if bad:
            good, left = 0, left - 1
            if left <= 0:
                scale = max(scale / 2, 1.0)
        else:
            good += 1
            if good == window:
                good, left, scale = 0, hysteresis, scale * 2
    return scales


@pytest.mark.parametrize("flags", ["", "--zero-stage 1 --overlap-param-gather", "--zero-stage 3"])
def test_dynamic_loss_scale(corpus, flags):
    """2^20 overflows for some steps; the counters, the schedule and the data follow the rules."""
    words = command(corpus, 14, FP16, "--initial-loss-scale 1048576", flags)
    records = train(words, Layout(dp=2))
    skipped = series(records, "skipped")
    assert 2 <= sum(skipped) < 12
    assert skipped[0] == 1
    assert series(records, "loss_scale") == expected_scales(2.0**20, skipped, 4, 2)
    # Samples always advance, the schedule on applied steps only; skipped steps change no weight.
    assert series(records, "consumed_train_samples") == [4 * (i + 1) for i in range(14)]
    first_applied = skipped.index(0)
    assert set(series(records, "learning_rate")[: first_applied + 1]) == {0.0}
    assert all(torch.isfinite(torch.tensor(series(records, "lm_loss"))))


def weights(state):
    return {p.name: p.data.clone() for chunk in state.chunks for p in chunk.held_parts()}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_skipped_steps_leave_every_bit(corpus, stage):
    words = command(corpus, 5, FP16, f"--initial-loss-scale 1e30 --zero-stage {stage}")
    fresh = train_and_inspect([*words, "--skip-train"], Layout(dp=2), weights)
    after = train_and_inspect(words, Layout(dp=2), weights)
    for before, now in zip(fresh, after, strict=True):
        assert all(torch.equal(before[name], now[name]) for name in before)


@pytest.mark.parametrize("stage", [0, 3])
def test_resuming_restores_the_scaler(corpus, tmp_path, stage):
    options = f"{FP16} --initial-loss-scale 1048576 --zero-stage {stage}"
    flags = ["--save-interval 5 --save", str(tmp_path / "save")]
    straight = train(command(corpus, 10, options), Layout(dp=2))
    path = tmp_path / "records.jsonl"
    train(command(corpus, 10, options, *flags, "--exit-interval 5"), Layout(dp=2), records=path)
    words = command(corpus, 10, options, *flags, "--load", str(tmp_path / "save"))
    resumed = train(words, Layout(dp=2), records=path)
    assert without_rates(resumed) == without_rates(straight)


def test_an_overflow_at_the_lowest_scale_ends_the_run(corpus):
    words = command(corpus, 30, FP16, "--initial-loss-scale 1e30 --min-loss-scale 1e30")
    with pytest.raises(NumericsError, match="minimum"):
        train(words)


@pytest.mark.parametrize("stage", ["1", pytest.param("3", marks=pytest.mark.full)])
def test_low_precision_state_resumes_bit_for_bit(corpus, tmp_path, stage):
    words = command(corpus, 5, SMALL, "--bf16", LOW_STATE, "--zero-stage", stage)
    straight = train(words, Layout(dp=2))
    words += ["--save-interval", "3", "--save", str(tmp_path / "save")]
    path = tmp_path / "records.jsonl"
    train([*words, "--exit-interval", "3"], Layout(dp=2), records=path)
    resumed = train([*words, "--load", str(tmp_path / "save")], Layout(dp=2), records=path)
    assert without_rates(resumed) == without_rates(straight)


def test_bf16_gradients_need_a_bf16_model(corpus):
    with pytest.raises(ConfigError, match="needs --bf16"):
        train(command(corpus, 2, SMALL, "--main-grads-dtype bf16"))


def test_on_the_cpu_offloading_changes_nothing_and_says_so(corpus, capsys):
    words = command(corpus, 3, SMALL)
    plain = train(words)
    capsys.readouterr()
    moved = train([*words, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"])
    assert "--optimizer-cpu-offload has no effect: the device is the CPU" in capsys.readouterr().out
    assert without_rates(moved) == without_rates(plain)


def test_main_parameters_are_fp32(corpus):
    with pytest.raises(ConfigError, match="a scale for every tensor"):
        train(command(corpus, 2, "--bf16 --main-params-dtype fp16"))
