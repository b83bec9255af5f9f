from types import SimpleNamespace

import pytest
import torch

from mcore.config.optimizer import OptimizerConfig
from mcore.device import HostRead
from mcore.log import get_logger
from mcore.training.loss_records import read_record
from mcore.training.settling import settle
from mcore.training.setup import UnsettledUpdate


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ((torch.tensor(12.0), torch.tensor(4.0)), (12.0, 4.0)),
        ({"lm loss": (torch.tensor(12.0), torch.tensor(4.0))}, (12.0, 4.0)),
        ({"lm loss": torch.tensor([12.0, 4.0])}, (12.0, 4.0)),
        ({"lm loss": torch.tensor(3.0)}, (3.0, 1.0)),
        (torch.tensor(3.0), (3.0, 1.0)),
        ((torch.tensor(12.0), 4), (12.0, 4.0)),
        ((12.0, 4), (12.0, 4.0)),
        ((12.0, torch.tensor(4)), (12.0, 4.0)),
        ({"lm loss": (12.0, 4)}, (12.0, 4.0)),
        ({"lm loss": 3.0}, (3.0, 1.0)),
    ],
)
def test_every_form_of_a_reported_loss(record, wanted):
    cpu = torch.device("cpu")
    assert tuple(float(x) for x in read_record(record, cpu)) == wanted
    elsewhere = read_record(record, torch.device("meta"))  # as on a GPU
    assert {x.device.type for x in elsewhere} == {"meta"}


class Schedule:
    def __init__(self):
        self.steps = []

    def step(self, increment):
        self.steps.append(increment)


def test_the_schedule_follows_updates_that_were_made():
    state = SimpleNamespace(
        scheduler=Schedule(),
        optimizer=SimpleNamespace(config=OptimizerConfig()),
        skipped_iterations=0,
        skipped_train_samples=0,
        iteration=1,
        unsettled=None,
    )
    settle(state)
    for applied in (True, False, True):
        numbers = (torch.tensor(x) for x in (applied, 1.0, 2.0, False))
        state.unsettled = UnsettledUpdate(HostRead(*numbers), 8)
        settle(state)
        settle(state)  # each update is settled once
    assert state.scheduler.steps == [8, 8]
    assert state.skipped_iterations == 1
    assert state.skipped_train_samples == 8


@pytest.mark.parametrize(
    ("options", "warns"),
    [({"fp16": True}, False), ({"fp16": True, "loss_scale": 512.0}, True), ({}, True)],
)
def test_updates_left_out_are_warned_of_but_for_a_dynamic_scale(
    caplog, monkeypatch, options, warns
):
    """Without --check-for-nan-in-loss-and-grad, so that nothing ends the run."""
    numbers = (torch.tensor(x) for x in (False, float("inf"), 2.0, False))
    state = SimpleNamespace(
        optimizer=SimpleNamespace(config=OptimizerConfig(**options)),
        skipped_iterations=0,
        skipped_train_samples=0,
        iteration=7,
        unsettled=UnsettledUpdate(HostRead(*numbers), 8),
    )
    monkeypatch.setattr(get_logger(), "propagate", True)
    with caplog.at_level("WARNING", logger="mcore"):
        settle(state)
    told = ["iteration 7: a gradient was not finite; its update was left out"] if warns else []
    assert caplog.messages == told
