"""The detector fires on what is a spike and on nothing else."""

import json
import math

import numpy as np
import pytest

from mcore.config.stability import StabilityConfig
from mcore.training.arguments import build_config, parse
from mcore.training.autopilot.detector import Limits, SpikeDetector


def fired(losses, norms=None, **options):
    """Numbers of the steps that the detector calls spikes; those stay out of its window."""
    detector = SpikeDetector(StabilityConfig(**options))
    norms = np.ones(len(losses)) if norms is None else norms
    found = []
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        limits = detector.limits()
        if loss > limits.loss or norm > limits.grad_norm:
            found.append(step)
        else:
            detector.observe(float(loss), float(norm))
    return found


def curve(steps, seed, noise=0.03):
    """A loss that falls from log 50,000 to about 2.5, and the gradient norm of a warm-up."""
    generator = np.random.default_rng(seed)
    step = np.arange(steps)
    losses = 2.5 + 8.3 / (1.0 + step / 60.0) ** 0.9 + noise * generator.standard_normal(steps)
    norms = (0.4 + 12.0 * np.exp(-step / 40.0)) * np.exp(0.25 * generator.standard_normal(steps))
    return losses, norms


@pytest.mark.parametrize("seed", range(6))
def test_warm_up_and_decay_are_no_spikes(seed):
    assert fired(*curve(1500, seed)) == []


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 0.1])
def test_noise_of_any_size_is_no_spike(noise):
    generator = np.random.default_rng(1)
    losses = 2.0 + noise * generator.standard_normal(1500)
    norms = 0.3 * np.exp(noise * generator.standard_normal(1500))
    assert fired(losses, norms) == []


def test_a_learning_rate_that_jumps_and_a_loss_that_drops_are_no_spikes():
    losses = np.concatenate([np.full(200, 4.0), np.full(200, 2.0), np.full(200, 1.0)])
    assert fired(losses) == []


def test_a_loss_that_rises_slowly_is_no_spike():
    assert fired(np.linspace(2.0, 4.0, 2000)) == []


@pytest.mark.parametrize("at", [40, 200, 1499])
def test_a_jump_of_the_loss_is_found(at):
    losses, norms = curve(1500, 5)
    losses[at] += 12.0 if at < 300 else 1.0
    assert fired(losses, norms) == [at]


def test_a_jump_of_the_gradient_norm_is_found():
    losses, norms = curve(1500, 6)
    norms[1200] = 100.0
    assert fired(losses, norms) == [1200]


def test_a_spike_that_lasts_is_found_whole():
    losses, norms = curve(1000, 7)
    losses[600:640] += 3.0
    assert fired(losses, norms) == list(range(600, 640))


def test_nothing_is_judged_before_there_are_enough_steps():
    losses = np.full(60, 2.0)
    losses[[10, 31, 50]] = 50.0
    assert fired(losses) == [50]  # the two before are in the window and do not move the median
    assert fired(losses, loss_spike_min_samples=5) == [10, 31, 50]


@pytest.mark.parametrize(("rise", "found"), [("", [150]), ("--loss-spike-min-rise 0.4", [])])
def test_a_jump_below_the_least_rise_is_none(rise, found):
    """The loss of a very quiet run, 30 % higher once."""
    losses = 2.0 + 1e-4 * np.random.default_rng(3).standard_normal(300)
    losses[150] *= 1.3
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 1"
    options = build_config(parse(f"{model} {rise}".split())).stability
    assert fired(losses, loss_spike_min_rise=options.loss_spike_min_rise) == found


def test_limits_by_hand():
    detector = SpikeDetector(
        StabilityConfig(
            loss_spike_window=5,
            loss_spike_min_samples=5,
            loss_spike_threshold=2.0,
            loss_spike_min_rise=0.0,
            grad_norm_spike_min_factor=1.0,
        )
    )
    for loss, norm in zip([9.0, 1.0, 2.0, 3.0, 4.0, 10.0], [1, 1, 2, 4, 8, 16], strict=True):
        detector.observe(loss, norm)
    limits = detector.limits()  # of 1 2 3 4 10: median 3, deviations 2 1 0 1 7, MAD 1
    assert limits.loss == pytest.approx(3.0 + 2.0 * 1.4826, rel=1e-12)
    assert limits.grad_norm == pytest.approx(4.0 * 2.0 ** (2.0 * 1.4826), rel=1e-12)
    assert detector.medians() == pytest.approx((3.0, 4.0))


def test_least_rise_and_least_factor_hold_where_nothing_varies():
    detector = SpikeDetector(StabilityConfig(loss_spike_min_samples=1))
    detector.observe(2.0, 0.5)
    limits = detector.limits()
    assert (limits.loss, limits.grad_norm) == pytest.approx((2.2, 2.5))


def test_what_is_not_finite_never_enters_the_window():
    detector = SpikeDetector(StabilityConfig(loss_spike_min_samples=1))
    for loss, norm in [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)]:
        detector.observe(loss, norm)
    assert detector.limits() == Limits()
    assert detector.medians() is None


def test_a_gradient_of_zero_is_bearable():
    detector = SpikeDetector(StabilityConfig(loss_spike_min_samples=1))
    detector.observe(0.0, 0.0)
    assert 0.0 < detector.limits().grad_norm < 1e-20


def test_state_goes_on_exactly_through_json():
    options = {"loss_spike_window": 40}
    first = SpikeDetector(StabilityConfig(**options))
    losses, norms = curve(100, 3)
    for loss, norm in zip(losses[:60], norms[:60], strict=True):
        first.observe(loss, norm)
    second = SpikeDetector(StabilityConfig(**options))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for loss, norm in zip(losses[60:], norms[60:], strict=True):
        assert first.limits() == second.limits()
        first.observe(loss, norm)
        second.observe(loss, norm)


def test_a_shorter_window_keeps_the_newest_steps():
    long = SpikeDetector(StabilityConfig())
    for loss in range(1, 129):
        long.observe(float(loss), 1.0)
    short = SpikeDetector(StabilityConfig(loss_spike_window=32))
    short.load_state_dict(long.state_dict())
    assert short.medians() == (112.5, 1.0)
