"""Learning rate and weight decay as functions of the number of samples trained on.

The rate of the first iteration is that of step 0: the schedule is read before the step it is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

from mcore.config.fields import choose
from mcore.config.optimizer import (
    DECAY_STYLES,
    WARMUP_STYLES,
    WEIGHT_DECAY_INCR_STYLES,
    WSD_DECAY_STYLES,
    OptimizerConfig,
    SchedulerConfig,
    scheduler_steps,
)
from mcore.errors import ConfigError
from mcore.log import get_logger

ParamGroup = dict[str, Any]

# Keys of `state_dict` that define the schedule, with the spellings of older checkpoints.
_SCHEDULE_KEYS: tuple[tuple[str, ...], ...] = (
    ("max_lr", "start_lr"),
    ("min_lr",),
    ("lr_warmup_steps", "warmup_steps", "warmup_iter"),
    ("lr_decay_steps", "decay_steps", "end_iter"),
    ("lr_decay_style", "decay_style"),
    ("start_wd",),
    ("end_wd",),
    ("wd_incr_steps",),
    ("wd_incr_style",),
    ("init_lr",),
    ("wsd_decay_steps",),
    ("lr_wsd_decay_style",),
    ("lr_warmup_style",),
    ("iteration_steps",),
)


class HasParamGroups(Protocol):
    """What the scheduler needs of an optimizer, torch's or mcore's."""

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The groups whose `lr` and `weight_decay` the scheduler writes."""
        ...


def decay_coefficient(style: str, ratio: float) -> float:
    """Share of the way from the lowest to the highest value that is left.

    Args:
        style: `linear`, `cosine`, `exponential` or `minus_sqrt`.
        ratio: part of the decay that is done, 0 to 1.
    """
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(ratio)


class OptimizerParamScheduler:
    """Writes `lr` and `weight_decay` into an optimizer's parameter groups.

    With s the step (samples so far), w the warmup, D the decay length (warmup included):

        s <= w                 init_lr + (max_lr - init_lr) s/w, or with a logarithmic warmup
                               log(i + 1)/log(n) for s/w, at iteration i = s/B of n = w/B
        constant               max_lr
        s > D                  min_lr
        inverse-square-root    max(min_lr, max_lr sqrt(w/s)), w and s at least 1
        linear, cosine         min_lr + c(r) (max_lr - min_lr),  r = (s - w)/(D - w)
        WSD                    c = 1 up to D - wsd_decay_steps, then its own style over the rest

    A group may override the range by its own `max_lr`, `min_lr`, `start_wd`, `end_wd`; `lr_mult`
    and `wd_mult` multiply the results (`wd_mult` is 0 for parameters that are not decayed).

    Args:
        optimizer: anything with `param_groups`.
        init_lr: rate at step 0 of the warmup.
        max_lr: highest rate.
        min_lr: lowest rate.
        lr_warmup_steps: samples of warmup; may be fractional.
        lr_decay_steps: samples of warmup and decay.
        lr_decay_style: constant, linear, cosine, inverse-square-root or WSD.
        start_wd: first weight decay.
        end_wd: last weight decay.
        wd_incr_steps: samples over which weight decay changes.
        wd_incr_style: constant, linear or cosine.
        use_checkpoint_opt_param_scheduler: `load_state_dict` takes the checkpoint's schedule.
        override_opt_param_scheduler: `load_state_dict` keeps this schedule.
        wsd_decay_steps: samples of WSD's final decay.
        lr_wsd_decay_style: linear, cosine, exponential or minus_sqrt.
        lr_warmup_style: linear or log.
        iteration_steps: samples of an iteration (B), which a logarithmic warmup counts.

    Raises:
        ConfigError: values that define no schedule.
    """

    def __init__(  # noqa: PLR0913  (Megatron's signature)
        self,
        optimizer: HasParamGroups,
        init_lr: float,
        max_lr: float,
        min_lr: float,
        lr_warmup_steps: float,
        lr_decay_steps: float,
        lr_decay_style: str,
        start_wd: float,
        end_wd: float,
        wd_incr_steps: float,
        wd_incr_style: str,
        use_checkpoint_opt_param_scheduler: bool = True,
        override_opt_param_scheduler: bool = False,
        wsd_decay_steps: float | None = None,
        lr_wsd_decay_style: str | None = None,
        *,
        lr_warmup_style: str = "linear",
        iteration_steps: int = 1,
    ) -> None:
        self.optimizer = optimizer
        self.init_lr = init_lr
        self.max_lr = float(max_lr)
        self.min_lr = min_lr
        self.lr_warmup_steps = lr_warmup_steps
        self.lr_decay_steps = lr_decay_steps
        self.lr_decay_style = lr_decay_style
        self.wsd_decay_steps = wsd_decay_steps
        self.lr_wsd_decay_style = lr_wsd_decay_style
        self.lr_warmup_style = lr_warmup_style
        self.iteration_steps = iteration_steps
        self.start_wd = start_wd
        self.end_wd = end_wd
        self.wd_incr_steps = wd_incr_steps
        self.wd_incr_style = wd_incr_style
        self.use_checkpoint_opt_param_scheduler = use_checkpoint_opt_param_scheduler
        self.override_opt_param_scheduler = override_opt_param_scheduler
        self.num_steps = 0
        self.lr_factor = 1.0
        self._check()
        self.step(0)

    def _check(self) -> None:
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler contradict "
                "each other; give one"
            )
        self._check_lr()
        self._check_wd()

    def _check_lr(self) -> None:
        choose(self.lr_decay_style, DECAY_STYLES, "lr_decay_style")
        choose(self.lr_warmup_style, WARMUP_STYLES, "lr_warmup_style")
        if not 0.0 <= self.min_lr <= self.max_lr or self.init_lr > self.max_lr:
            raise ConfigError(
                f"learning rates must satisfy 0 <= min_lr ({self.min_lr}) <= max_lr "
                f"({self.max_lr}) and init_lr ({self.init_lr}) <= max_lr"
            )
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise ConfigError(
                f"lr_warmup_steps ({self.lr_warmup_steps}) must be below lr_decay_steps "
                f"({self.lr_decay_steps}); warmup is part of the decay length"
            )
        if self.lr_decay_style == "WSD":
            if self.wsd_decay_steps is None or self.lr_wsd_decay_style is None:
                raise ConfigError("WSD needs wsd_decay_steps and lr_wsd_decay_style")
            choose(self.lr_wsd_decay_style, WSD_DECAY_STYLES, "lr_wsd_decay_style")

    def _check_wd(self) -> None:
        choose(self.wd_incr_style, WEIGHT_DECAY_INCR_STYLES, "wd_incr_style")
        if not 0.0 <= self.start_wd <= self.end_wd:
            raise ConfigError(
                f"weight decay must satisfy 0 <= start_wd ({self.start_wd}) <= end_wd "
                f"({self.end_wd})"
            )
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ConfigError(
                f"a constant weight decay needs start_wd ({self.start_wd}) == end_wd "
                f"({self.end_wd})"
            )

    def get_lr(self, param_group: ParamGroup) -> float:
        """Learning rate of a group at the present step, before `lr_mult`."""
        return self.lr_factor * self._scheduled_lr(param_group)

    def _scheduled_lr(self, param_group: ParamGroup) -> float:
        max_lr: float = param_group.get("max_lr", self.max_lr)
        min_lr: float = param_group.get("min_lr", self.min_lr)
        step, warmup = self.num_steps, self.lr_warmup_steps
        if warmup > 0 and step <= warmup:
            if self.lr_warmup_style == "linear":  # in Megatron's order of operations
                return self.init_lr + (max_lr - self.init_lr) * float(step) / float(warmup)
            return self.init_lr + (max_lr - self.init_lr) * self._warmed_up()
        if self.lr_decay_style == "constant":
            return max_lr
        if step > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(min_lr, max_lr * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
        return min_lr + self._lr_coefficient() * (max_lr - min_lr)

    def _warmed_up(self) -> float:
        """Part of the way from the initial to the highest rate, by the logarithm."""
        length = max(2.0, self.lr_warmup_steps / self.iteration_steps)
        return min(1.0, math.log(self.num_steps / self.iteration_steps + 1.0) / math.log(length))

    def _lr_coefficient(self) -> float:
        if self.lr_decay_style != "WSD":
            done = self.num_steps - self.lr_warmup_steps
            return decay_coefficient(
                self.lr_decay_style, done / (self.lr_decay_steps - self.lr_warmup_steps)
            )
        assert self.wsd_decay_steps is not None
        assert self.lr_wsd_decay_style is not None
        done = self.num_steps - (self.lr_decay_steps - self.wsd_decay_steps)
        if done <= 0:
            return 1.0
        return decay_coefficient(self.lr_wsd_decay_style, done / self.wsd_decay_steps)

    def get_wd(self, param_group: ParamGroup | None = None) -> float:
        """Weight decay at the present step, before `wd_mult`."""
        group = param_group or {}
        start_wd: float = group.get("start_wd", self.start_wd)
        end_wd: float = group.get("end_wd", self.end_wd)
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return end_wd
        left = 1.0 - float(self.num_steps) / float(self.wd_incr_steps)
        grown = 1.0 - left if self.wd_incr_style == "linear" else decay_coefficient("cosine", left)
        return start_wd + grown * (end_wd - start_wd)

    def scale_lr(self, factor: float) -> None:
        """Multiply every learning rate of the schedule, from now on."""
        if factor != self.lr_factor:
            self.lr_factor = factor
            self.step(0)

    def step(self, increment: int) -> None:
        """Advance by `increment` samples and write the new values into every group."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr(group) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """The step and what defines the schedule, under Megatron's keys and five more."""
        is_wsd = self.lr_decay_style == "WSD"
        is_log = self.lr_warmup_style == "log"
        return {
            "init_lr": self.init_lr,
            "max_lr": self.max_lr,
            "lr_warmup_steps": self.lr_warmup_steps,
            "num_steps": self.num_steps,
            "lr_decay_style": self.lr_decay_style,
            "lr_decay_steps": self.lr_decay_steps,
            "min_lr": self.min_lr,
            "start_wd": self.start_wd,
            "end_wd": self.end_wd,
            "wd_incr_style": self.wd_incr_style,
            "wd_incr_steps": self.wd_incr_steps,
            "wsd_decay_steps": self.wsd_decay_steps if is_wsd else None,
            "lr_wsd_decay_style": self.lr_wsd_decay_style if is_wsd else None,
            "lr_warmup_style": self.lr_warmup_style,
            "iteration_steps": self.iteration_steps if is_log else 1,
        }

    def differences(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What of a checkpoint's schedule is other than here.

        Raises:
            ConfigError: the schedules differ and neither was chosen.
        """
        theirs = dict(_known_values(state_dict))
        ours = self.state_dict()
        changed = {key: value for key, value in theirs.items() if value != ours[key]}
        if theirs.get("wd_incr_style") == ours["wd_incr_style"] == "constant":
            changed.pop("wd_incr_steps", None)  # no ramp, so that its length decides nothing
        is_chosen = self.override_opt_param_scheduler or self.use_checkpoint_opt_param_scheduler
        if changed and not is_chosen:
            listed = "; ".join(f"{k}: here {ours[k]}, checkpoint {v}" for k, v in changed.items())
            raise ConfigError(
                f"the schedule differs from the checkpoint's ({listed}); choose with "
                "--override-opt-param-scheduler (this one) or --use-checkpoint-opt-param-scheduler"
            )
        return changed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's step, with its schedule or this one.

        Raises:
            ConfigError: the schedules differ and neither was chosen.
        """
        changed = self.differences(state_dict)
        if changed and self.override_opt_param_scheduler:
            get_logger().info("keeping this run's schedule, not the checkpoint's %s", changed)
        elif changed:
            get_logger().info("taking the checkpoint's schedule: %s", changed)
            self._take(changed)
        key = "num_steps" if "num_steps" in state_dict else "num_iters"
        self.num_steps = 0
        self.step(state_dict[key])

    def _take(self, values: dict[str, Any]) -> None:
        """Adopt a checkpoint's values."""
        self.__dict__.update(values)
        self._check()


def get_optimizer_param_scheduler(
    optimizer: HasParamGroups,
    config: OptimizerConfig,
    schedule: SchedulerConfig,
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
) -> OptimizerParamScheduler:
    """The scheduler that the options ask for; see `scheduler_steps` for the lengths.

    Raises:
        ConfigError: no learning rate, or options that define no schedule.
    """
    if config.lr is None:
        raise ConfigError("the schedule needs its highest learning rate; give lr")
    steps = scheduler_steps(
        schedule,
        global_batch_size=global_batch_size,
        train_iters=train_iters,
        train_samples=train_samples,
    )
    start_wd, end_wd = schedule.start_weight_decay, schedule.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=schedule.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=steps.lr_warmup_steps,
        lr_decay_steps=steps.lr_decay_steps,
        lr_decay_style=schedule.lr_decay_style,
        start_wd=config.weight_decay if start_wd is None else start_wd,
        end_wd=config.weight_decay if end_wd is None else end_wd,
        wd_incr_steps=steps.wd_incr_steps,
        wd_incr_style=schedule.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=schedule.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=schedule.override_opt_param_scheduler,
        wsd_decay_steps=steps.wsd_decay_steps,
        lr_wsd_decay_style=schedule.lr_wsd_decay_style,
        lr_warmup_style=schedule.lr_warmup_style,
        iteration_steps=global_batch_size if schedule.lr_warmup_style == "log" else 1,
    )


def _known_values(state_dict: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, *older in _SCHEDULE_KEYS:
        for spelling in (key, *older):
            if spelling in state_dict:
                yield key, state_dict[spelling]
                break
