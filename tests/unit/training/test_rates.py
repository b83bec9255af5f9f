from types import SimpleNamespace

import pytest
import torch

from mcore.config.run import resolve
from mcore.topology.context import ParallelContext
from mcore.training import rates
from mcore.training.arguments import build_config, parse
from mcore.training.initialize import Runtime
from mcore.training.pipeline_plan import plan_pipeline
from mcore.training.rates import RateMeter

WORDS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    "--train-iters 20 --lr 1e-3"
)


@pytest.fixture
def clock(monkeypatch):
    ticks = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: ticks.now))
    return ticks


def meter(first):
    config = build_config(parse(WORDS.split()))
    runtime = Runtime(ParallelContext.single(), torch.device("cpu"), False, plan_pipeline(config))
    return RateMeter(config, resolve(config, 1), runtime, first)


def test_the_remaining_time_is_never_negative(clock):
    """A run that was resumed at iteration 12 goes back to a checkpoint of iteration 9."""
    made = meter(12)
    made.start()
    clock.now += 4.0
    made.add(13, 2.0, 1, 0.0)
    made.add(14, 2.0, 1, 0.0)
    assert made.take(14).remaining == 2.0 * 6
    made.rewind(9)
    clock.now += 50.0  # loading
    made.start()
    clock.now += 3.0
    made.add(10, 3.0, 1, 0.0)
    assert made.take(10).remaining == 3.0 * 10
