"""A pipeline by name: all ranks' plans, proved, with their communication."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from mcore.errors import ConfigError
from mcore.pipeline_parallel.actions import Plan
from mcore.pipeline_parallel.communication import Program, plan_communication
from mcore.pipeline_parallel.plans import (
    forward_part,
    plan_1f1b,
    plan_interleaved,
    plan_no_pipelining,
)
from mcore.pipeline_parallel.simulate import simulate
from mcore.topology.placement import StagePlacement

ScheduleName: TypeAlias = Literal["no-pipelining", "1f1b", "interleaved-1f1b"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a pipeline of pp ranks does in one step.

    Attributes:
        plans: for each rank, its actions.
        placement: where the stages live.
        programs: for each rank, its actions and communication.
    """

    plans: tuple[Plan, ...]
    placement: StagePlacement
    programs: tuple[Program, ...]


@lru_cache(maxsize=16)
def build_pipeline(
    schedule: ScheduleName,
    pp: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group: int | None = None,
    forward_only: bool = False,
) -> Pipeline:
    """The pipeline of a schedule; it is simulated first, and built once for the same arguments.

    Args:
        schedule: its name.
        pp: pipeline size.
        num_microbatches: m >= 1.
        num_chunks: model chunks a rank.
        group: microbatch group size of the interleaved schedule; None = pp.
        forward_only: only the forwards, in the same order.

    Raises:
        ConfigError: sizes that the schedule is not defined for.
        ScheduleError: a plan that cannot run, with the rank, the action and the reason.
    """
    plans = tuple(
        _plan(schedule, pp, rank, num_microbatches, num_chunks, group) for rank in range(pp)
    )
    if forward_only:
        plans = tuple(map(forward_part, plans))
    placement = StagePlacement.usual(pp, num_chunks)
    programs = plan_communication(plans, placement)
    simulate(plans, placement, programs=programs)
    return Pipeline(plans, placement, programs)


def _plan(
    schedule: ScheduleName,
    pp: int,
    rank: int,
    num_microbatches: int,
    num_chunks: int,
    group: int | None,
) -> Plan:
    if schedule == "interleaved-1f1b":
        return plan_interleaved(pp, rank, num_microbatches, num_chunks, group)
    if schedule == "1f1b":
        if num_chunks != 1:
            raise ConfigError(
                f"schedule 1f1b runs one model chunk a rank, got {num_chunks}: use interleaved-1f1b"
            )
        return plan_1f1b(pp, rank, num_microbatches)
    if pp != 1:
        raise ConfigError(f"schedule no-pipelining needs pipeline size 1, got {pp}: use 1f1b")
    return plan_no_pipelining(num_microbatches, num_chunks)
