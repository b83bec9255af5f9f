"""All ranks' plans of a schedule, proved, with their communication."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from mcore.errors import ScheduleError
from mcore.pipeline_parallel.actions import Plan
from mcore.pipeline_parallel.communication import Program, plan_communication
from mcore.pipeline_parallel.messages import check_plans
from mcore.pipeline_parallel.plans import forward_part
from mcore.pipeline_parallel.schedule import Schedule
from mcore.pipeline_parallel.simulate import simulate
from mcore.topology.placement import StagePlacement


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
    schedule: Schedule, pp: int, num_microbatches: int, forward_only: bool = False
) -> Pipeline:
    """The pipeline of a schedule; it is simulated first, and built once for the same arguments.

    Args:
        schedule: which one.
        pp: pipeline size.
        num_microbatches: m >= 1.
        forward_only: only the forwards, in the same order.

    Raises:
        ConfigError: sizes that the schedule is not defined for.
        ScheduleError: a plan that cannot run, with the rank, the action and the reason.
    """
    plans, placement = schedule.plans(pp, num_microbatches), schedule.placement(pp)
    try:
        return _prove(plans, placement, forward_only)
    except ScheduleError as error:
        other = None if schedule.custom is None else schedule.custom.with_other_placement()
        if other is None or not _runs(plans, replace(schedule, custom=other).placement(pp)):
            raise
        line = "placement: v" if other.is_v else "placement: usual"
        raise ScheduleError(f"{error}; with a line `{line}` in the file it would run") from error


def _prove(plans: tuple[Plan, ...], placement: StagePlacement, forward_only: bool) -> Pipeline:
    check_plans(plans, placement, trains=True)
    if forward_only:
        plans = tuple(map(forward_part, plans))
    programs = plan_communication(plans, placement)
    simulate(plans, placement, programs=programs)
    return Pipeline(plans, placement, programs)


def _runs(plans: tuple[Plan, ...], placement: StagePlacement) -> bool:
    try:
        _prove(plans, placement, forward_only=False)
    except ScheduleError:
        return False
    return True


@lru_cache(maxsize=256)
def rank_program(
    schedule: Schedule, pp: int, rank: int, num_microbatches: int, forward_only: bool = False
) -> Program:
    """What one rank does, see `build_pipeline`.

    A batch that grows, or is cut by a token budget, comes back to many numbers of microbatches. One
    rank's part of each is small, so that more of them are kept than whole pipelines.
    """
    return build_pipeline(schedule, pp, num_microbatches, forward_only).programs[rank]
