"""Optimizer, gradient clipping, parameter groups, learning-rate and weight-decay schedules."""

from mcore.optimizer.lr_scheduler import OptimizerParamScheduler

__all__ = ["OptimizerParamScheduler"]
