"""A schedule by name: for any size, where the stages live and what each rank does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from mcore.errors import ConfigError, ScheduleError
from mcore.pipeline_parallel.actions import Kind, Plan, parse_plans
from mcore.pipeline_parallel.plans import (
    plan_1f1b,
    plan_bounded,
    plan_gpipe,
    plan_interleaved,
    plan_no_pipelining,
)
from mcore.pipeline_parallel.zero_bubble import plan_zb_h1, plan_zb_v
from mcore.topology.placement import StagePlacement

ScheduleName: TypeAlias = Literal[
    "no-pipelining", "gpipe", "1f1b", "interleaved-1f1b", "bounded", "zb-h1", "zb-v", "custom"
]
SCHEDULE_NAMES: tuple[str, ...] = get_args(ScheduleName)
_CHOICES = [name for name in SCHEDULE_NAMES if name not in ("no-pipelining", "custom")]


@dataclass(frozen=True, slots=True)
class CustomPlans:
    """Plans that somebody wrote down.

    Attributes:
        plans: for each rank, its actions.
        is_v: the stages are laid out as `StagePlacement.v`, not as usual.
        source: where they come from, for messages.
    """

    plans: tuple[Plan, ...]
    is_v: bool
    source: str

    @property
    def num_microbatches(self) -> int:
        """The one number of microbatches that the plans are for."""
        return 1 + max((a.microbatch for plan in self.plans for a in plan), default=-1)

    @property
    def num_chunks(self) -> int:
        """Chunks a rank."""
        return 1 + max((a.chunk for plan in self.plans for a in plan), default=-1)

    def with_other_placement(self) -> CustomPlans | None:
        """The same plans with stages laid out as a V, or as usual; None where there is no V."""
        return replace(self, is_v=not self.is_v) if self.num_chunks == 2 else None


def parse_schedule(text: str, source: str) -> CustomPlans:
    """Read a file of actions: one line a rank, actions separated by spaces or commas.

    A line `placement: v` says that the stages are laid out as a V (`placement: usual` is the
    default). Empty cells, empty lines and lines that start with `#` are skipped.

    Args:
        text: the file's text.
        source: its name, for messages.

    Raises:
        ScheduleError: a word is no action, or a placement that does not exist.
    """
    is_v, lines = False, []
    for line in text.replace('"', " ").splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == "placement":
            if value.strip() not in ("usual", "v"):
                raise ScheduleError(f"{source}: placement is {value.strip()!r}; write usual or v")
            is_v, line = value.strip() == "v", ""
        lines.append(line)
    try:
        plans = parse_plans("\n".join(lines))
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from error
    if not plans:
        raise ScheduleError(f"{source}: there are no actions in it; write one line of them a rank")
    return CustomPlans(plans, is_v, source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which schedule, with what it needs to know beside the sizes of the pipeline.

    Attributes:
        name: no-pipelining (one rank), gpipe, 1f1b, interleaved-1f1b, bounded, zb-h1, zb-v or
            custom.
        num_chunks: model chunks a rank.
        group: microbatch group size of interleaved-1f1b; None = the pipeline size.
        max_in_flight: what bounded allows on a rank.
        custom: the plans of custom.

    Raises:
        ConfigError: an option that the schedule lacks or has no use for.
    """

    name: ScheduleName
    num_chunks: int = 1
    group: int | None = None
    max_in_flight: int | None = None
    custom: CustomPlans | None = None

    def __post_init__(self) -> None:
        if self.name not in SCHEDULE_NAMES:
            raise ConfigError(
                f"unknown schedule {self.name!r}; use one of {', '.join(_CHOICES)}, or file:PATH "
                "with plans of your own"
            )
        if (self.name == "custom") != (self.custom is not None):
            raise ConfigError("plans are needed for schedule custom, and for no other")
        if self.name == "bounded" and self.max_in_flight is None:
            raise ConfigError(
                "schedule bounded needs --max-in-flight-microbatches N, the microbatches that a "
                "rank may hold"
            )
        if self.name != "bounded" and self.max_in_flight is not None:
            raise ConfigError(
                f"--max-in-flight-microbatches ({self.max_in_flight}) belongs to schedule bounded, "
                f"not to {self.label}; drop it"
            )
        if self.group is not None and self.name != "interleaved-1f1b":
            raise ConfigError(
                f"--microbatch-group-size-per-virtual-pipeline-stage ({self.group}) belongs to "
                f"schedule interleaved-1f1b, not to {self.label}; drop it"
            )
        if self.name in ("gpipe", "1f1b", "bounded", "zb-h1") and self.num_chunks != 1:
            raise ConfigError(
                f"schedule {self.name} runs one model chunk a rank, got {self.num_chunks}: use "
                f"interleaved-1f1b or zb-v, or one chunk"
            )
        if self.name == "zb-v" and self.num_chunks != 2:
            raise ConfigError(
                f"schedule zb-v runs two model chunks a rank, got {self.num_chunks}: use 2"
            )

    @property
    def label(self) -> str:
        """What messages call it: the name, or where its plans come from."""
        return self.name if self.custom is None else self.custom.source

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        if self.custom is not None:
            return any(a.kind is Kind.WEIGHT for plan in self.custom.plans for a in plan)
        return self.name in ("zb-h1", "zb-v")

    def placement(self, pp: int) -> StagePlacement:
        """Where the stages live in a pipeline of pp ranks."""
        if self.name == "zb-v" or (self.custom is not None and self.custom.is_v):
            return StagePlacement.v(pp)
        return StagePlacement.usual(pp, self.num_chunks)

    def plans(self, pp: int, num_microbatches: int) -> tuple[Plan, ...]:
        """What each rank does; not proved yet, see `build_pipeline`.

        Args:
            pp: pipeline size.
            num_microbatches: m >= 1.

        Raises:
            ConfigError: sizes that the schedule is not defined for.
        """
        if self.custom is not None:
            return self._custom_plans(pp, num_microbatches)
        return tuple(self._plan(pp, rank, num_microbatches) for rank in range(pp))

    def _plan(self, pp: int, rank: int, m: int) -> Plan:
        if self.name == "no-pipelining":
            if pp != 1:
                raise ConfigError(
                    f"schedule no-pipelining needs pipeline size 1, got {pp}: use 1f1b"
                )
            return plan_no_pipelining(m, self.num_chunks)
        if self.name == "interleaved-1f1b":
            return plan_interleaved(pp, rank, m, self.num_chunks, self.group)
        if self.max_in_flight is not None:
            return plan_bounded(pp, rank, m, self.max_in_flight)
        planners = {
            "gpipe": plan_gpipe,
            "1f1b": plan_1f1b,
            "zb-h1": plan_zb_h1,
            "zb-v": plan_zb_v,
        }
        return planners[self.name](pp, rank, m)

    def _custom_plans(self, pp: int, num_microbatches: int) -> tuple[Plan, ...]:
        custom = self.custom
        assert custom is not None
        for what, wanted, got in (
            ("pipeline ranks", pp, len(custom.plans)),
            ("chunks a rank", self.num_chunks, custom.num_chunks),
            ("microbatches", num_microbatches, custom.num_microbatches),
        ):
            if wanted != got:
                raise ConfigError(
                    f"{custom.source} is a schedule for {got} {what}, and {wanted} are needed"
                )
        return custom.plans


def default_schedule(pp: int, num_chunks: int = 1, group: int | None = None) -> Schedule:
    """What Megatron runs: no-pipelining on one rank, 1f1b, or interleaved-1f1b over chunks."""
    if pp == 1:
        return Schedule(name="no-pipelining", num_chunks=num_chunks)
    if num_chunks == 1:
        return Schedule(name="1f1b")
    return Schedule(name="interleaved-1f1b", num_chunks=num_chunks, group=group)
