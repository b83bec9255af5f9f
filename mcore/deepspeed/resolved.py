"""A DeepSpeed configuration with every value that a run had: what "auto" was, and the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mcore.deepspeed.rules import is_auto

#: From (section, field) to the value that the run has.
ValueOf = Callable[[str, str], Any]

_AUTO: Mapping[str, Callable[[ValueOf], Any]] = {
    "gradient_clipping": lambda value: value("optimizer", "clip_grad"),
    "bf16.enabled": lambda value: value("training", "bf16"),
    "bfloat16.enabled": lambda value: value("training", "bf16"),
    "fp16.enabled": lambda value: value("optimizer", "fp16"),
    "fp16.loss_scale": lambda value: value("optimizer", "loss_scale") or 0,
    "fp16.loss_scale_window": lambda value: value("optimizer", "loss_scale_window"),
    "fp16.hysteresis": lambda value: value("optimizer", "hysteresis"),
    "fp16.min_loss_scale": lambda value: value("optimizer", "min_loss_scale"),
    "optimizer.params.lr": lambda value: value("optimizer", "lr"),
    "optimizer.params.betas": lambda value: [
        value("optimizer", f"{'lion' if value('optimizer', 'optimizer') == 'lion' else 'adam'}_{b}")
        for b in ("beta1", "beta2")
    ],
    "optimizer.params.eps": lambda value: value("optimizer", "adam_eps"),
    "optimizer.params.weight_decay": lambda value: value("optimizer", "weight_decay"),
    "optimizer.params.momentum": lambda value: value("optimizer", "sgd_momentum"),
    "scheduler.params.warmup_min_lr": lambda value: value("scheduler", "lr_warmup_init"),
    "scheduler.params.warmup_max_lr": lambda value: value("optimizer", "lr"),
    "scheduler.params.warmup_num_steps": lambda value: value("scheduler", "lr_warmup_iters"),
    "scheduler.params.total_num_steps": lambda value: (
        value("scheduler", "lr_decay_iters") or value("training", "train_iters")
    ),
    "zero_optimization.reduce_bucket_size": lambda value: value("ddp", "bucket_size"),
    "zero_optimization.allgather_bucket_size": lambda value: value("ddp", "bucket_size"),
    "zero_optimization.overlap_comm": lambda value: value("ddp", "overlap_grad_reduce"),
}


def resolved_config(
    config: Mapping[str, Any], value_of: ValueOf, batch: tuple[int, int, int]
) -> dict[str, Any]:
    """The configuration as the run had it.

    Args:
        config: as it was read.
        value_of: (section, field) -> value.
        batch: samples of a step, of a micro batch, and micro batches of a copy.

    Returns:
        The same keys with their values; an "auto" without a counterpart here is left out.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    filled = _filled(config, "", value_of)
    return {**filled, **dict(zip(names, batch, strict=True))}


def _filled(block: Mapping[str, Any], path: str, value_of: ValueOf) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for key, value in block.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            filled[key] = _filled(value, where, value_of)
        elif not is_auto(value):
            filled[key] = value
        elif where in _AUTO:
            filled[key] = _AUTO[where](value_of)
    return filled
