import json
from pathlib import Path

import pytest
import torch

from mcore.config.optimizer import OptimizerConfig, SchedulerConfig, scheduler_steps
from mcore.errors import ConfigError
from mcore.optimizer import get_optimizer_param_scheduler
from mcore.optimizer_param_scheduler import OptimizerParamScheduler

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "schedules.json").read_text())


class Groups:
    def __init__(self, *groups):
        self.param_groups = list(groups) or [{}]


def make(optimizer=None, **changes):
    values = {
        "init_lr": 0.0,
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_steps": 40,
        "lr_decay_steps": 200,
        "lr_decay_style": "cosine",
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_steps": 200,
        "wd_incr_style": "constant",
    }
    return OptimizerParamScheduler(optimizer or Groups(), **{**values, **changes})


@pytest.mark.parametrize("case", GOLDEN["lr"], ids=lambda c: f"{c['config']['lr_decay_style']}")
def test_equals_megatron_tables(case):
    optimizer = Groups({"params": []})
    scheduler = OptimizerParamScheduler(optimizer, **case["config"])
    for step, lr, wd in case["step_lr_wd"]:
        assert scheduler.num_steps == step
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr, rel=1e-15, abs=0)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(wd, rel=1e-15, abs=0)
        scheduler.step(case["increment"])


def test_group_multipliers_and_ranges():
    optimizer = Groups({"wd_mult": 0.0}, {"lr_mult": 2.0}, {"max_lr": 4e-3, "min_lr": 4e-3})
    scheduler = make(optimizer)
    scheduler.step(40)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, 0.1, 0.1]
    assert [g["lr"] for g in optimizer.param_groups] == [1e-3, 2e-3, 4e-3]


def test_drives_a_torch_optimizer():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = make(optimizer, lr_decay_style="constant")
    scheduler.step(20)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.5e-3)


def test_resume_continues_at_the_step():
    first = make()
    first.step(48)
    second = make(use_checkpoint_opt_param_scheduler=False)
    second.load_state_dict(first.state_dict())
    assert second.num_steps == 48
    assert second.get_lr({}) == first.get_lr({})


def test_a_changed_schedule_needs_a_choice():
    state = make().state_dict()
    changed = {"max_lr": 1e-4, "min_lr": 1e-5}
    with pytest.raises(ConfigError, match=r"max_lr: here 0.0001, checkpoint 0.001.*override"):
        make(**changed, use_checkpoint_opt_param_scheduler=False).load_state_dict(state)


def test_a_ramp_of_constant_weight_decay_has_no_length():
    old = make()
    old.step(48)
    longer = make(wd_incr_steps=400, use_checkpoint_opt_param_scheduler=False)
    longer.load_state_dict(old.state_dict())
    assert longer.num_steps == 48
    ramp = {"wd_incr_style": "linear", "use_checkpoint_opt_param_scheduler": False}
    with pytest.raises(ConfigError, match="wd_incr_steps: here 400, checkpoint 200"):
        make(wd_incr_steps=400, **ramp).load_state_dict(make(**ramp).state_dict())


def test_override_keeps_only_the_new_schedule():
    old = make()
    old.step(100)
    optimizer = Groups()
    new = make(
        optimizer,
        max_lr=1e-4,
        min_lr=1e-5,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    new.load_state_dict(old.state_dict())
    expected = make(max_lr=1e-4, min_lr=1e-5)
    expected.step(100)
    assert optimizer.param_groups[0]["lr"] == expected.get_lr({}) <= 1e-4


def test_checkpoint_schedule_wins_except_over_a_groups_own_range():
    old = make(start_wd=0.0, end_wd=0.2, wd_incr_style="linear")
    old.step(100)
    optimizer = Groups({}, {"max_lr": 7e-5, "min_lr": 1e-6})
    new = make(optimizer, max_lr=1e-4, min_lr=1e-5)
    new.load_state_dict(old.state_dict())
    assert optimizer.param_groups[0]["lr"] == old.get_lr({})
    assert optimizer.param_groups[0]["weight_decay"] == old.get_wd() == pytest.approx(0.1)
    assert optimizer.param_groups[1]["lr"] < 7e-5


def test_older_spellings_load():
    state = {"start_lr": 1e-3, "min_lr": 1e-4, "warmup_iter": 40, "end_iter": 200}
    scheduler = make(use_checkpoint_opt_param_scheduler=False)
    scheduler.load_state_dict({**state, "decay_style": "cosine", "num_iters": 64})
    assert scheduler.num_steps == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_lr": 1e-5}, "min_lr"),
        ({"init_lr": 1.0}, "init_lr"),
        ({"lr_warmup_steps": 200}, "lr_warmup_steps"),
        ({"lr_decay_style": "cubic"}, "lr_decay_style"),
        ({"lr_decay_style": "WSD"}, "wsd_decay_steps"),
        ({"end_wd": 0.2}, "constant"),
        ({"start_wd": 0.2}, "start_wd"),
        ({"override_opt_param_scheduler": True}, "contradict"),
    ],
)
def test_refuses_values_that_define_no_schedule(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_scheduler_steps_in_iterations():
    config = SchedulerConfig(
        lr_decay_iters=20, lr_warmup_iters=4, lr_decay_style="WSD", lr_wsd_decay_iters=5
    )
    steps = scheduler_steps(config, global_batch_size=8, train_iters=30)
    assert (steps.lr_warmup_steps, steps.lr_decay_steps) == (32, 160)
    assert (steps.wd_incr_steps, steps.wsd_decay_steps) == (240, 40)


def test_scheduler_steps_in_samples():
    steps = scheduler_steps(
        SchedulerConfig(lr_warmup_fraction=0.01), global_batch_size=8, train_samples=1000
    )
    assert (steps.lr_warmup_steps, steps.lr_decay_steps) == (10.0, 1000)
    assert (steps.wd_incr_steps, steps.wsd_decay_steps) == (1000, None)


@pytest.mark.parametrize(
    ("config", "length", "message"),
    [
        ({"lr_warmup_samples": 4}, {"train_iters": 10}, "lr_warmup_samples"),
        ({"lr_decay_iters": 4}, {"train_samples": 10}, "lr_decay_iters"),
        ({}, {}, "exactly one"),
        ({}, {"train_iters": 1, "train_samples": 8}, "exactly one"),
        ({"lr_decay_style": "WSD"}, {"train_iters": 10}, "lr_wsd_decay_iters"),
    ],
)
def test_scheduler_steps_refuses(config, length, message):
    with pytest.raises(ConfigError, match=message):
        scheduler_steps(SchedulerConfig(**config), global_batch_size=8, **length)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 1}, "not both"),
        ({"start_weight_decay": 0.1}, "weight_decay_incr_style"),
        ({"weight_decay_incr_style": "linear"}, "both"),
        ({"lr_warmup_fraction": 1.0}, r"\[0, 1\)"),
    ],
)
def test_scheduler_config_refuses(config, message):
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**config)


def test_scheduler_from_options():
    """The run of the golden training curves: 20 iterations of 8 samples, 4 of them warmup."""
    optimizer = Groups({"wd_mult": 1.0}, {"wd_mult": 0.0})
    scheduler = get_optimizer_param_scheduler(
        optimizer,
        OptimizerConfig(lr=2e-3, min_lr=2e-4, weight_decay=0.1),
        SchedulerConfig(lr_decay_style="cosine", lr_decay_iters=20, lr_warmup_iters=4),
        global_batch_size=8,
        train_iters=20,
    )
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(8)
    assert rates == pytest.approx(GOLDEN["train_gpt2_lr"], abs=1e-15)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_weight_decay_ramp_from_options():
    scheduler = get_optimizer_param_scheduler(
        Groups(),
        OptimizerConfig(lr=1e-3, weight_decay=0.5),
        SchedulerConfig(
            start_weight_decay=0.0, end_weight_decay=0.2, weight_decay_incr_style="linear"
        ),
        global_batch_size=4,
        train_iters=10,
    )
    scheduler.step(20)
    assert scheduler.get_wd() == pytest.approx(0.1)
