"""What a run does about loss spikes and numbers that are not finite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from mcore.config.fields import below, flag, not_one_of, refuse
from mcore.errors import ConfigError

POLICIES = ("off", "report", "skip", "rollback")
RERUN_MODES = ("validate_results", "disabled")


@dataclass(frozen=True, kw_only=True, slots=True)
class StabilityConfig:
    """The stability autopilot; see docs/autopilot.md.

    Raises:
        ConfigError: a number out of range, or options that need others.
    """

    loss_spike_policy: Literal["off", "report", "skip", "rollback"] = flag(
        "off",
        help="What to do about a step whose loss or gradient norm is far above the recent ones, or "
        "not finite: nothing; tell; leave its update out; or go back to the last checkpoint and "
        "leave out the data since. Other than off it reads the device once a step.",
    )
    loss_spike_window: int = flag(
        128, help="Applied steps whose loss and gradient norm are the measure of the next."
    )
    loss_spike_min_samples: int = flag(
        32, help="Steps in the window before any step is called a spike."
    )
    loss_spike_threshold: float = flag(
        8.0,
        help="A spike lies this many robust standard deviations (1.4826 MAD) above the median, in "
        "the loss or in the logarithm of the gradient norm.",
    )
    loss_spike_min_rise: float = flag(
        0.1, help="And its loss is above the median by at least this share of it."
    )
    grad_norm_spike_min_factor: float = flag(
        5.0, help="Or its gradient norm is at least this many times the median."
    )
    loss_spike_max_skips: int = flag(
        10,
        help="Consecutive steps left out, by a policy or by --grad-norm-skip-threshold, before the "
        "run gives up with exit code 17.",
    )
    loss_spike_max_rollbacks: int = flag(
        3,
        help="Returns to a checkpoint, without a new update saved in between, before the run gives "
        "up with exit code 17.",
    )
    loss_spike_skip_iterations: int | None = flag(
        None,
        help="With rollback: leave out the data of so many iterations, the last of them the "
        "spike, and train those before once more; everything since the checkpoint when absent.",
    )
    loss_spike_lr_dip: float = flag(
        1.0,
        help="After a rollback multiply the learning rate by this; it recovers linearly over "
        "--loss-spike-lr-dip-iters.",
    )
    loss_spike_lr_dip_iters: int = flag(100, help="Iterations until the learning rate is back.")
    grad_norm_skip_threshold: float | None = flag(
        None,
        help="Leave out every update whose gradient norm (before clipping) is above this. To tell "
        "of it every step waits for the device, also with --loss-spike-policy off.",
    )
    iterations_to_skip: tuple[str, ...] | None = flag(
        None,
        metavar="N",
        help="Iterations (from 1) or ranges such as 12-20 whose data is passed over: samples count "
        "as consumed, nothing is computed.",
    )
    rerun_mode: Literal["validate_results", "disabled"] = flag(
        "validate_results",
        help="With a policy other than off: compute a step that is not finite once more, to tell a "
        "transient fault from a real one and to find where it begins.",
    )
    autopilot_log: str | None = flag(
        None,
        metavar="FILE",
        help="JSON lines of what the autopilot did and why; SAVE/autopilot.jsonl when absent.",
    )
    on_alert: str | None = flag(
        None,
        metavar="CMD",
        help="Shell command that rank 0 runs for every event of the autopilot, and for numbers "
        "that end the run under any policy, with its JSON on standard input; training never waits "
        "for it.",
    )
    alert_timeout: float = flag(
        30.0, help="Seconds after which the command of --on-alert is killed."
    )

    def __post_init__(self) -> None:
        refuse(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_one_of(self.loss_spike_policy, POLICIES, "loss_spike_policy")
        yield from not_one_of(self.rerun_mode, RERUN_MODES, "rerun_mode")
        yield from below(
            self,
            1,
            "loss_spike_window",
            "loss_spike_min_samples",
            "loss_spike_max_skips",
            "loss_spike_max_rollbacks",
            "loss_spike_skip_iterations",
            "loss_spike_lr_dip_iters",
        )
        for name in ("loss_spike_threshold", "grad_norm_skip_threshold", "alert_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"`{name}` is {value}; use a number above 0"
        yield from self._wrong_ranges()
        try:
            parse_iterations(self.iterations_to_skip or ())
        except ConfigError as error:
            yield str(error)
        if self.on_alert is not None and not self.on_alert.strip():
            yield "on_alert is empty; give a shell command"

    def _wrong_ranges(self) -> Iterator[str]:
        if self.loss_spike_min_samples > self.loss_spike_window:
            yield (
                f"loss_spike_min_samples ({self.loss_spike_min_samples}) must not exceed "
                f"loss_spike_window ({self.loss_spike_window})"
            )
        if not self.loss_spike_min_rise >= 0:
            yield f"loss_spike_min_rise is {self.loss_spike_min_rise}; use 0 or more"
        if not self.grad_norm_spike_min_factor >= 1:
            yield f"grad_norm_spike_min_factor is {self.grad_norm_spike_min_factor}; use 1 or more"
        if not 0 < self.loss_spike_lr_dip <= 1:
            yield (f"loss_spike_lr_dip is {self.loss_spike_lr_dip}; use a factor above 0, up to 1")
        if self.loss_spike_policy != "rollback":
            for name in ("loss_spike_skip_iterations", "loss_spike_lr_dip"):
                if getattr(self, name) not in (None, 1.0):
                    yield f"{name} needs --loss-spike-policy rollback"


def parse_iterations(words: Iterable[str]) -> tuple[range, ...]:
    """Ranges of iterations out of words such as `7` and `12-20`, ends included.

    Raises:
        ConfigError: a word that is neither, a range that runs backwards, or an iteration below 1.
    """
    ranges, wrong = [], []
    for word in words:
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if 1 <= first <= last:
            ranges.append(range(first, last + 1))
        else:
            wrong.append(repr(word))
    if wrong:
        raise ConfigError(
            f"iterations_to_skip has {', '.join(wrong)}; write iterations from 1 up, or ranges "
            "such as 12-20"
        )
    return tuple(ranges)
