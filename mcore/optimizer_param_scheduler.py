"""Megatron's module path of the learning-rate and weight-decay schedule."""

from mcore.optimizer.lr_scheduler import OptimizerParamScheduler

__all__ = ["OptimizerParamScheduler"]
