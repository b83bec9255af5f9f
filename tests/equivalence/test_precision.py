"""Low precision: fp16 with dynamic loss scaling, bf16 beside fp32, at several ZeRO stages."""

import pytest
import torch

from mcore.convert import load_model_state, save_model_state
from mcore.errors import ConfigError, NumericsError
from mcore.training.gpt import datasets_provider, model_provider
from pretrain_gpt import forward_step
from tests.equivalence.program import (
    Layout,
    Providers,
    largest_difference,
    read_records,
    series,
    train,
    train_and_inspect,
    without_rates,
)
from tests.equivalence.tiny import command

SMALL = "--num-layers 2 --hidden-size 16 --seq-length 8"
DEEP = "--hidden-size 16 --seq-length 8"  # four layers, for virtual stages
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


@pytest.fixture(scope="module")
def deep_fp32(corpus):
    return train(command(corpus, 4, DEEP), Layout(pp=2))


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(tp=2, pp=2, sp=True), "--fp16 --initial-loss-scale 1024"),
        (Layout(pp=2, vpp=2, dp=2), "--bf16 --zero-stage 3"),
        pytest.param(Layout(tp=2, pp=2, sp=True), "--bf16", marks=pytest.mark.full),
        *(
            pytest.param(layout, f"{kind} --zero-stage {stage}", marks=pytest.mark.full)
            for layout in (Layout(pp=2, vpp=2, dp=2), Layout(tp=2, pp=2, dp=2, sp=True))
            for kind in ("--bf16", "--fp16 --initial-loss-scale 1024")
            for stage in range(4)
        ),
    ],
    ids=str,
)
def test_low_precision_at_layouts_and_stages(corpus, deep_fp32, layout, flags):
    records = train(command(corpus, 4, DEEP, flags), layout)
    assert 0 < largest_difference(records, deep_fp32) <= 2e-2
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


_before: dict[int, list[torch.Tensor]] = {}


def watching_forward_step(data_iterator, model):
    """Takes down the weights that each iteration begins with."""
    if data_iterator.iteration not in _before:
        _before[data_iterator.iteration] = [p.detach().clone() for p in model.parameters()]
    return forward_step(data_iterator, model)


def unchanged_by(state):
    """Iterations, but for the last, that left every weight as it was."""
    steps, found = sorted(_before), []
    for step, following in zip(steps, steps[1:], strict=False):
        if all(map(torch.equal, _before[step], _before[following])):
            found.append(step)
    _before.clear()
    return found, state.optimizer.step_count, state.optimizer.grad_scaler.state_dict()


@pytest.mark.full
def test_a_scale_of_2_to_the_40(corpus, tmp_path):
    """Scenario C08: from far above the overflow, with the window of 1000, and a resume."""
    options = f"{SMALL} --fp16 --initial-loss-scale {2**40} --lr-warmup-iters 0"
    words = command(corpus, 30, options)
    providers = Providers(datasets_provider, model_provider, watching_forward_step)
    path = tmp_path / "records.jsonl"
    ranks = train_and_inspect(
        [*words, "--metrics-jsonl", str(path)], Layout(dp=2), unchanged_by, providers=providers
    )
    records = read_records(path)
    skipped = series(records, "skipped")
    assert 5 <= sum(skipped) < 30
    assert series(records, "loss_scale") == expected_scales(2.0**40, skipped, 1000, 2)
    assert series(records, "consumed_train_samples") == [4 * (i + 1) for i in range(30)]
    for unchanged, count, scaler in ranks:
        assert unchanged == [i for i, bad in enumerate(skipped[:-1], 1) if bad]
        assert count == 30 - sum(skipped)
        assert scaler["scale"] == expected_scales(2.0**40, [*skipped, 0], 1000, 2)[-1]
    # The schedule counts applied steps only.
    applied = 0
    rates = series(train(command(corpus, 30, SMALL, "--lr-warmup-iters 0")), "learning_rate")
    for record in records:
        assert record["learning_rate"] == pytest.approx(rates[applied], abs=1e-12)
        applied += not record["skipped"]
    flags = ["--save-interval 4 --save", str(tmp_path / "save")]
    resumed = tmp_path / "resumed.jsonl"
    train(command(corpus, 30, options, *flags, "--exit-interval 4"), Layout(dp=2), records=resumed)
    words = command(corpus, 30, options, *flags, "--load", str(tmp_path / "save"))
    again = train(words, Layout(dp=2), records=resumed)
    assert without_rates(again) == without_rates(records)


@pytest.mark.full
def test_a_broken_weight_ends_at_the_lowest_scale(corpus, tmp_path):
    """Scenario C09: a weight of 1e30, which fp16 does not have, in the checkpoint."""
    good, broken = tmp_path / "good", tmp_path / "broken"
    train(command(corpus, 2, SMALL, "--fp16 --loss-scale 512 --save-interval 2 --save", str(good)))
    options, tensors = load_model_state(good)
    weights = {name: tensors[name].clone() for name in tensors}
    weights["decoder.layers.0.mlp.linear_fc1.weight"][0, 0] = 1e30
    save_model_state(broken, options, weights, {})
    before = {p: p.read_bytes() for p in broken.rglob("*") if p.is_file()}
    words = command(
        corpus, 100, SMALL, "--fp16 --min-loss-scale 1 --finetune --load", str(broken),
        "--save-interval 10 --save", str(tmp_path / "save"),
    )  # fmt: skip
    path = tmp_path / "records.jsonl"
    with pytest.raises(NumericsError, match="at its minimum"):
        train(words, Layout(), records=path)
    records = read_records(path)
    assert all(series(records, "skipped"))
    assert 30 <= len(records) <= 36  # 32 halvings, and the hysteresis
    assert {p: p.read_bytes() for p in broken.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_skipped_steps_leave_every_bit(corpus, stage):
    words = command(corpus, 5, FP16, f"--initial-loss-scale 1e30 --zero-stage {stage}")
    fresh = train_and_inspect([*words, "--skip-train"], Layout(dp=2), weights)
    after = train_and_inspect(words, Layout(dp=2), weights)
    for before, now in zip(fresh, after, strict=True):
        assert all(torch.equal(before[name], now[name]) for name in before)


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.full)])
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
    words += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5"]
    moved = train([*words, "--cpu-offloading-num-layers", "2"])
    told = capsys.readouterr().out
    assert "--optimizer-cpu-offload has no effect: the device is the CPU" in told
    assert "--cpu-offloading-num-layers has no effect: the device is the CPU" in told
    assert without_rates(moved) == without_rates(plain)


def test_main_parameters_are_fp32(corpus):
    with pytest.raises(ConfigError, match="a scale for every tensor"):
        train(command(corpus, 2, "--bf16 --main-params-dtype fp16"))
