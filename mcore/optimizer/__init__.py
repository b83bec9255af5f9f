"""Optimizer, gradient clipping, parameter groups, learning-rate and weight-decay schedules."""

from mcore.config.optimizer import OptimizerConfig, SchedulerConfig, scheduler_steps
from mcore.optimizer.lr_scheduler import OptimizerParamScheduler, get_optimizer_param_scheduler
from mcore.optimizer.optimizer import (
    DistributedOptimizer,
    MegatronOptimizer,
    StepResult,
    Veto,
    get_megatron_optimizer,
)

__all__ = [
    "DistributedOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "SchedulerConfig",
    "StepResult",
    "Veto",
    "get_megatron_optimizer",
    "get_optimizer_param_scheduler",
    "scheduler_steps",
]
