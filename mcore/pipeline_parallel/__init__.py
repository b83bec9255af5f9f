"""Pipelines as data: plans, their proof, and the one executor that runs them."""

from mcore.pipeline_parallel.actions import Action, Kind, Plan, format_plans, parse_plans
from mcore.pipeline_parallel.costs import Costs
from mcore.pipeline_parallel.executor import PipelineExecutor, ScheduleResult
from mcore.pipeline_parallel.hooks import ScheduleHooks
from mcore.pipeline_parallel.p2p_communication import P2PCommunicator, TensorSpec
from mcore.pipeline_parallel.pipeline import Pipeline, build_pipeline
from mcore.pipeline_parallel.plans import (
    plan_1f1b,
    plan_bounded,
    plan_gpipe,
    plan_interleaved,
    plan_no_pipelining,
)
from mcore.pipeline_parallel.schedule import (
    CustomPlans,
    Schedule,
    ScheduleName,
    default_schedule,
    parse_schedule,
)
from mcore.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from mcore.pipeline_parallel.simulate import Simulation, simulate
from mcore.pipeline_parallel.user_config import hooks_from_config
from mcore.pipeline_parallel.zero_bubble import plan_zb_h1, plan_zb_v
from mcore.topology.placement import Location, StagePlacement
from mcore.topology.stages import split_layers, stage_layers

__all__ = [
    "Action",
    "Costs",
    "CustomPlans",
    "Kind",
    "Location",
    "P2PCommunicator",
    "Pipeline",
    "PipelineExecutor",
    "Plan",
    "Schedule",
    "ScheduleHooks",
    "ScheduleName",
    "ScheduleResult",
    "Simulation",
    "StagePlacement",
    "TensorSpec",
    "build_pipeline",
    "default_schedule",
    "format_plans",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_forward_backward_func",
    "hooks_from_config",
    "parse_plans",
    "parse_schedule",
    "plan_1f1b",
    "plan_bounded",
    "plan_gpipe",
    "plan_interleaved",
    "plan_no_pipelining",
    "plan_zb_h1",
    "plan_zb_v",
    "simulate",
    "split_layers",
    "stage_layers",
]
