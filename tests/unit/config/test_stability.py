import pytest

from mcore.config.stability import StabilityConfig, parse_iterations
from mcore.errors import ConfigError
from mcore.training.arguments import parse
from mcore.training.initialize import Launch
from mcore.training.prepare import prepare
from tests.equivalence.tiny import command


def test_iterations_and_ranges():
    assert parse_iterations(["7", "12-14"]) == (range(7, 8), range(12, 15))


@pytest.mark.parametrize("word", ["0", "-3", "5-3", "x", "3-", "1.5", "", "2--4"])
def test_a_word_that_is_no_iteration_is_refused(word):
    with pytest.raises(ConfigError, match="iterations_to_skip"):
        parse_iterations([word])


def test_all_wrong_words_are_told_beside_other_problems():
    with pytest.raises(ConfigError, match=r"(?s)threshold.*'5-3', '0', 'a'; write"):
        StabilityConfig(iterations_to_skip=("5-3", "7", "0", "a"), grad_norm_skip_threshold=-1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_spike_policy": "panic"},
        {"rerun_mode": "report_stats"},
        {"loss_spike_window": 0},
        {"loss_spike_min_samples": 129},
        {"loss_spike_threshold": 0.0},
        {"loss_spike_threshold": float("nan")},
        {"loss_spike_min_rise": -0.1},
        {"grad_norm_spike_min_factor": 0.5},
        {"grad_norm_skip_threshold": 0.0},
        {"loss_spike_lr_dip": 0.0, "loss_spike_policy": "rollback"},
        {"loss_spike_lr_dip": 0.5},
        {"loss_spike_skip_iterations": 3, "loss_spike_policy": "skip"},
        {"iterations_to_skip": ("x",)},
        {"alert_timeout": 0.0},
        {"on_alert": " "},
    ],
)
def test_options_that_cannot_be_right_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        StabilityConfig(**options)


def test_rollback_needs_checkpoints_with_the_optimizer():
    words = command("corpus", 2, "--loss-spike-policy rollback")
    with pytest.raises(ConfigError, match="rollback .*--save DIR"):
        prepare(parse(words), Launch(0, 1, 0))
    words += ["--save", "absent", "--save-interval", "1", "--no-save-optim"]
    with pytest.raises(ConfigError, match="--no-save-optim"):
        prepare(parse(words), Launch(0, 1, 0))
