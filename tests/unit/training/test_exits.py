import os
import signal
from types import SimpleNamespace

import pytest
import torch

from mcore.config.checkpoint import CheckpointConfig
from mcore.config.run import RunConfig
from mcore.config.training import TrainingConfig
from mcore.config.transformer import TransformerConfig
from mcore.errors import ConfigError
from mcore.topology.context import ParallelContext
from mcore.training import exits
from mcore.training.exits import Exits, forget_workers
from mcore.training.initialize import Runtime


class Watch:
    """Signals that a test gives."""

    def __init__(self):
        self.started, self.exit_signal, self.save, self.calls = 100.0, None, False, []

    def take_save(self):
        asked, self.save = self.save, False
        return asked

    def let_signals_kill(self):
        self.calls.append("kill")

    def let_save_signal_exit(self):
        self.calls.append("save exits")


@pytest.fixture
def clock(monkeypatch):
    ticks = SimpleNamespace(now=100.0)
    monkeypatch.setattr(exits, "time", SimpleNamespace(monotonic=lambda: ticks.now))
    return ticks


def make(watch, **options):
    config = RunConfig(
        model=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        training=TrainingConfig(**options),
    )
    runtime = Runtime(ParallelContext.single(), torch.device("cpu"), False, None)
    return Exits(config, runtime, watch)


def test_nothing_happens_until_something_is_asked_for():
    made = make(Watch())
    assert made.ask() is made.leaving is False
    assert made.take_save() is False


def test_a_save_is_agreed_on_once_even_where_it_has_to_wait():
    watch = Watch()
    made = make(watch)
    watch.save = True
    assert made.ask() is False
    assert made.ask() is False  # within an evaluation nobody saves
    assert made.take_save() is True
    assert made.take_save() is False


def test_leaving_stays_and_has_its_first_reason(clock):
    watch = Watch()
    made = make(watch, exit_duration_in_mins=2)
    watch.exit_signal = int(signal.SIGINT)
    assert made.ask() is True
    clock.now += 600
    watch.exit_signal = None
    assert made.ask() is True
    assert made.reason == "SIGINT"


def test_the_time_counts_from_the_start_of_the_process(clock):
    made = make(Watch(), exit_duration_in_mins=0.5)
    clock.now = 130.0
    assert made.ask() is False
    clock.now = 130.1
    assert made.ask() is False  # nothing was done yet, and a restart would not do more
    made.has_moved = True
    assert made.ask() is True
    assert made.reason == "--exit-duration-in-mins"
    with pytest.raises(ConfigError, match="`exit_duration_in_mins` is 0"):
        TrainingConfig(exit_duration_in_mins=0)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, []),
        (dict(exit_signal="SIGTERM"), []),
        (dict(exit_signal="SIGUSR1"), ["save exits"]),
        (dict(exit_signal_handler=False), ["kill"]),
    ],
)
def test_what_options_do_to_the_signals(options, calls):
    watch = Watch()
    make(watch, **options)
    assert watch.calls == calls


def test_without_a_watch_the_time_counts_all_the_same(clock):
    made = make(None, exit_duration_in_mins=1)
    made.has_moved = True
    assert made.ask() is False
    clock.now += 61
    assert made.ask() is True


def test_the_time_ends_a_measurement_too(clock):
    made = make(Watch(), exit_duration_in_mins=1, skip_train=True)
    clock.now += 61
    assert made.ask() is True


@pytest.mark.parametrize(
    ("text", "left"),
    [(f"{os.getpid()} a\n77 b\n", False), ("77\n", True)],
    ids=["its own", "another"],
)
def test_the_list_of_workers_goes_with_the_run_that_wrote_it(tmp_path, text, left):
    path = tmp_path / "worker.pids"
    path.write_text(text)
    config = RunConfig(
        model=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
        checkpoint=CheckpointConfig(save=str(tmp_path)),
    )
    runtime = Runtime(ParallelContext.single(), torch.device("cpu"), False, None)
    forget_workers(config, runtime)
    assert path.exists() is left
    forget_workers(config, runtime)  # it may be gone
