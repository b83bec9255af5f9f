"""Log line, curves and records: everything that a run writes down about itself."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from mcore import device
from mcore.config.run import Resolved, RunConfig
from mcore.log import get_logger
from mcore.training.initialize import Runtime
from mcore.training.log_line import interval_line
from mcore.training.rates import RateMeter, Rates
from mcore.training.records import RecordFile
from mcore.training.reports import Reports
from mcore.training.scalars import Scalars, open_scalars
from mcore.training.setup import TrainState
from mcore.training.step import StepOutcome
from mcore.training.timers import Timers

#: Perplexities are exp(loss); the loss is cut here so that a diverged run prints a number.
_MAX_PERPLEXITY_LOSS = 20.0

#: Curve -> name in the record.
_CURVES = {
    "lm loss": "lm_loss",
    "grad-norm": "grad_norm",
    "learning-rate": "learning_rate",
    "weight-decay": "weight_decay",
    "loss-scale": "loss_scale",
    "iteration-time": "seconds",
    "batch-size": "global_batch_size",
    "num-zeros": "num_zeros",
    "params-norm": "params_norm",
}


class RunLog:
    """Collects step outcomes on every rank and writes them on one.

    On the CPU every step is written at once. On CUDA outcomes are kept as tensors and read at the
    log interval, at evaluations, saves and exit, so that no step waits for the device.

    Args:
        config: intervals and files.
        resolved: length of the run.
        runtime: who writes, and the device.
        iteration: finished iterations at the start.
        timers: phases that steps time; None = a log of its own that nobody times.

    Comm: gathers the hosts' names.
    """

    def __init__(
        self,
        config: RunConfig,
        resolved: Resolved,
        runtime: Runtime,
        iteration: int,
        timers: Timers | None = None,
    ) -> None:
        self._config = config.logging
        self._resolved = resolved
        self._device = runtime.device
        self._pending: list[tuple[dict[str, Any], StepOutcome]] = []
        self._interval: list[dict[str, Any]] = []
        self._passed: list[int] = []
        self._last_time = time.perf_counter()
        self._meter = RateMeter(config, resolved, runtime, iteration)
        self._flops_per_sample = self._meter.flops_per_token * resolved.seq_length
        self._reports = Reports(config, runtime, timers)
        self._is_writer = runtime.is_writer
        self._records: RecordFile | None = None
        self._scalars: list[Scalars] = []
        if not self._is_writer:
            return
        # A job that is started again after its end measures the finished model again.
        is_finished = iteration == resolved.train_iters and not config.training.skip_train
        is_finished = is_finished and config.evaluation.eval_iters > 0
        if self._config.metrics_jsonl is not None:
            self._records = RecordFile(
                self._config.metrics_jsonl, iteration, measures_again=is_finished
            )
        self._scalars = open_scalars(config, iteration, measures_again=is_finished)

    def restart_clock(self) -> None:
        """Begin timing the next step now: what came before was not training."""
        self._meter.start()
        self._last_time = time.perf_counter()

    def step(self, state: TrainState, outcome: StepOutcome) -> None:
        """Take note of a finished step.

        Comm: at the log interval, small gathers over all ranks' hosts.
        """
        due = state.iteration % self._config.log_interval == 0
        if due:  # the interval's time is that of its work, not of handing it to the device
            device.synchronize(self._device)
        now = time.perf_counter()
        fields: dict[str, Any] = {
            "iteration": state.iteration,
            "consumed_train_samples": state.consumed_train_samples,
            "seconds": now - self._last_time,
        }
        self._last_time = now
        self._meter.add(state.iteration, fields["seconds"], outcome.sequences, outcome.data_wait)
        self._pending.append((fields, outcome))
        if due:
            self.end_interval(state)
        elif self._device.type == "cpu":
            self.flush()

    def passed_over(self, state: TrainState, samples: int) -> None:
        """Take note of an iteration whose data was passed over."""
        self.flush()
        self._passed.append(state.iteration)
        if self._records is not None:
            self._records.write(
                {
                    "iteration": state.iteration,
                    "consumed_train_samples": state.consumed_train_samples,
                    "skipped": 1,
                    "passed_over": True,
                    "tokens": 0,
                    "global_batch_size": samples,
                }
            )
        self.restart_clock()

    def rewind(self, iteration: int) -> None:
        """Forget what came after an iteration: the run has gone back to it."""
        self._pending.clear()
        self._interval = [r for r in self._interval if r["iteration"] <= iteration]
        self._passed = [number for number in self._passed if number <= iteration]
        if self._records is not None:
            self._records.rewind(iteration)
        self._meter.rewind(iteration)
        for sink in self._scalars:
            sink.rewind(iteration)
        self.restart_clock()

    def end_interval(self, state: TrainState) -> None:
        """Print the line of the steps since the last one, if there are any. Collective.

        Comm: see `step`.
        """
        if not self._meter.steps:
            return
        rates = self._meter.take(state.iteration)
        if self._config.log_throughput and self._pending:
            self._pending[-1][0].update(_rate_record(rates))
        self.flush()
        records, self._interval = self._interval, []
        passed, self._passed = self._passed, []
        if self._is_writer:
            get_logger().info(
                interval_line(
                    records,
                    rates,
                    self._resolved.train_iters,
                    passed_over=len(passed),
                    throughput=self._config.log_throughput,
                )
            )
        extra = self._reports.interval(state.iteration, rates.steps)
        curves = _rate_curves(rates, self._config.log_throughput) | extra
        for sink in self._scalars:
            sink.add(curves, state.iteration)
            sink.flush()

    def flush(self) -> None:
        """Read the outcomes that are still on the device, and write them."""
        pending, self._pending = self._pending, []
        for fields, outcome in pending:
            record = _read(fields, outcome)
            self._interval.append(record)
            if self._records is not None:
                self._records.write(record)
            if record["iteration"] % self._config.tensorboard_log_interval == 0:
                self._draw(record)

    def _draw(self, record: Mapping[str, Any]) -> None:
        curves = {curve: record[name] for curve, name in _CURVES.items() if name in record}
        for sink in self._scalars:
            sink.add(curves, record["iteration"])
            samples = {"lm loss vs samples": record["lm_loss"]}
            sink.add_by_samples(samples, record["consumed_train_samples"])

    def evaluation(
        self, split: str, state: TrainState, loss: float, corpus: str | None = None
    ) -> None:
        """Write the loss of an evaluation on the validation or test set, or on one of several."""
        self.flush()
        perplexity = math.exp(min(_MAX_PERPLEXITY_LOSS, loss))
        name = "validation" if split == "valid" else split
        if corpus is not None:
            name += f" {corpus}"
        get_logger().info(
            " %s loss at iteration %d | lm loss value: %.6E | lm loss PPL: %.6E |",
            name,
            state.iteration,
            loss,
            perplexity,
        )
        if self._records is not None:
            record: dict[str, Any] = {
                "iteration": state.iteration,
                f"{split}_lm_loss": loss,
                f"{split}_ppl": perplexity,
            }
            if corpus is not None:
                record[f"{split}_set"] = corpus
            self._records.write(record)
        for sink in self._scalars:
            sink.add({f"lm loss {name}": loss, f"lm loss {name} ppl": perplexity}, state.iteration)

    def progress(self, what: str, state: TrainState) -> None:
        """Note a start, a save or the end in the progress file (`--log-progress`)."""
        self._reports.progress(what, state, self._flops_per_sample)

    def phases(self, seconds: Mapping[str, float]) -> None:
        """Say how long phases outside the steps took. Collective.

        Comm: gathers a few numbers from every rank's host.
        """
        self._reports.phases(seconds)

    def close(self) -> None:
        """Write what is left and close the files."""
        self.flush()
        if self._records is not None:
            self._records.close()
        for sink in self._scalars:
            sink.close()


def _read(fields: Mapping[str, Any], outcome: StepOutcome) -> dict[str, Any]:
    """The record of a step; waits for the device."""
    return {
        **fields,
        "lm_loss": float(outcome.loss),
        "grad_norm": float(outcome.grad_norm),
        "learning_rate": outcome.learning_rate,
        "weight_decay": outcome.weight_decay,
        "loss_scale": float(outcome.loss_scale),
        "skipped": 0 if bool(outcome.applied) else 1,
        "tokens": int(outcome.num_tokens),
        "global_batch_size": outcome.global_batch_size,
        **{name: float(value) for name, value in outcome.watched.items()},
    }


def _rate_record(rates: Rates) -> dict[str, Any]:
    return {
        "tokens_per_second": rates.tokens_per_second,
        "tflops_per_gpu": rates.tflops,
        "mfu": rates.mfu,
        "data_wait_seconds": rates.data_wait,
    }


def _rate_curves(rates: Rates, throughput: bool) -> dict[str, float]:
    curves = {"tokens-per-second": rates.tokens_per_second, "data-wait": rates.data_wait}
    if rates.mfu is not None:
        curves["mfu"] = rates.mfu
    return curves | ({"throughput": rates.tflops} if throughput else {})
