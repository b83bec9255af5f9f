"""The line of an interval, with Megatron's fields in Megatron's order: other tools parse it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mcore.training.rates import Rates


def interval_line(
    records: Sequence[Mapping[str, Any]],
    rates: Rates,
    train_iters: int,
    *,
    passed_over: int = 0,
    throughput: bool = False,
) -> str:
    """The line of the records since the last one; our own fields come after Megatron's.

    Args:
        records: of the interval, at least one.
        rates: of the interval.
        train_iters: length of the run.
        passed_over: iterations of the interval that have no record of a step.
        throughput: with TFLOP/s (`--log-throughput`).
    """
    last = records[-1]
    applied = [r["lm_loss"] for r in records if not r["skipped"]]
    fields = [
        f"iteration {last['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {last['consumed_train_samples']:12d}",
        f"elapsed time per iteration (ms): {1000.0 * rates.seconds:.1f}",
    ]
    if throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {_short(rates.tflops)}")
    fields += [
        f"learning rate: {last['learning_rate']:.6E}",
        f"global batch size: {last['global_batch_size']:5d}",
        f"lm loss: {sum(applied) / len(applied) if applied else math.nan:.6E}",
        f"loss scale: {last['loss_scale']:.1f}",
        f"grad norm: {last['grad_norm']:.3f}",
    ]
    if "num_zeros" in last:
        fields.append(f"num zeros: {int(last['num_zeros'])}")
    if "params_norm" in last:
        fields.append(f"params norm: {last['params_norm']:.3f}")
    fields += [
        f"number of skipped iterations: {sum(r['skipped'] for r in records) + passed_over:3d}",
        f"number of nan iterations: {sum(not math.isfinite(r['lm_loss']) for r in records):3d}",
        f"tokens per second: {rates.tokens_per_second:.1f}",
        f"MFU: {'unknown' if rates.mfu is None else f'{100.0 * rates.mfu:.2f}%'}",
        f"data wait (ms): {1000.0 * rates.data_wait:.1f}",
        f"ETA: {rates.eta}",
    ]
    stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
    return f" [{stamp}] {' | '.join(fields)} |"


def _short(value: float) -> str:
    """One decimal as Megatron prints, and more where that would hide the number."""
    return f"{value:.1f}" if value >= 10 else f"{value:.4g}"
