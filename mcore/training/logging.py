"""Log line, TensorBoard and records: everything that a run writes down about itself."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from mcore.config.run import Resolved, RunConfig
from mcore.errors import ConfigError
from mcore.log import get_logger
from mcore.training.initialize import Runtime
from mcore.training.records import RecordFile
from mcore.training.setup import TrainState
from mcore.training.step import StepOutcome

#: Perplexities are exp(loss); the loss is cut here so that a diverged run prints a number.
_MAX_PERPLEXITY_LOSS = 20.0


class RunLog:
    """Collects step outcomes and writes them on one rank.

    On the CPU every step is written at once. On CUDA outcomes are kept as tensors and read at the
    log interval, at evaluations, saves and exit, so that no step waits for the device.

    Args:
        config: intervals and files.
        resolved: length of the run.
        runtime: who writes, and the device.
        iteration: finished iterations at the start.
    """

    def __init__(
        self, config: RunConfig, resolved: Resolved, runtime: Runtime, iteration: int
    ) -> None:
        self._config = config.logging
        self._resolved = resolved
        self._reads_at_once = runtime.device.type == "cpu"
        self._pending: list[tuple[dict[str, Any], StepOutcome]] = []
        self._interval: list[dict[str, Any]] = []
        self._passed: list[int] = []
        self._last_time = time.perf_counter()
        self._records: RecordFile | None = None
        self._tensorboard: SummaryWriter | None = None
        if not runtime.is_writer:
            return
        if self._config.metrics_jsonl is not None:
            self._records = RecordFile(self._config.metrics_jsonl, iteration)
        self._directory = self._config.tensorboard_dir
        if self._directory is None and config.checkpoint.save is not None:
            self._directory = str(Path(config.checkpoint.save) / "tensorboard")
        if self._directory is not None:
            self._open_tensorboard(iteration)
            get_logger().info("TensorBoard: tensorboard --logdir %s", self._directory)

    def _open_tensorboard(self, iteration: int) -> None:
        """Hide points beyond the iteration: they will be written again."""
        assert self._directory is not None
        try:
            self._tensorboard = SummaryWriter(
                self._directory,
                max_queue=self._config.tensorboard_queue_size,
                purge_step=iteration + 1,
            )
        except OSError as error:
            raise ConfigError(f"the TensorBoard directory cannot be written: {error}") from error

    def restart_clock(self) -> None:
        """Begin timing the next step now: what came before was not training."""
        self._last_time = time.perf_counter()

    def step(self, state: TrainState, outcome: StepOutcome) -> None:
        """Take note of a finished step."""
        now = time.perf_counter()
        fields: dict[str, Any] = {
            "iteration": state.iteration,
            "consumed_train_samples": state.consumed_train_samples,
            "seconds": now - self._last_time,
        }
        self._last_time = now
        self._pending.append((fields, outcome))
        due = state.iteration % self._config.log_interval == 0
        if due or self._reads_at_once:
            self.flush()
        if due:
            self._print_line()

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
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._open_tensorboard(iteration)
        self.restart_clock()

    def flush(self) -> list[dict[str, Any]]:
        """Read the outcomes that are still on the device, and write them."""
        written = [self._read(fields, outcome) for fields, outcome in self._pending]
        self._pending.clear()
        for record in written:
            self._interval.append(record)
            if self._records is not None:
                self._records.write(record)
            self._write_scalars(record)
        return written

    def _read(self, fields: Mapping[str, Any], outcome: StepOutcome) -> dict[str, Any]:
        return {
            "iteration": fields["iteration"],
            "consumed_train_samples": fields["consumed_train_samples"],
            "lm_loss": float(outcome.loss),
            "grad_norm": float(outcome.grad_norm),
            "learning_rate": outcome.learning_rate,
            "weight_decay": outcome.weight_decay,
            "loss_scale": float(outcome.loss_scale),
            "skipped": 0 if bool(outcome.applied) else 1,
            "tokens": int(outcome.num_tokens),
            "global_batch_size": outcome.global_batch_size,
            "seconds": fields["seconds"],
            **{name: float(value) for name, value in outcome.watched.items()},
        }

    def _write_scalars(self, record: Mapping[str, Any]) -> None:
        iteration = record["iteration"]
        if self._tensorboard is None or iteration % self._config.tensorboard_log_interval:
            return
        for tag, name in (
            ("lm loss", "lm_loss"),
            ("grad-norm", "grad_norm"),
            ("learning-rate", "learning_rate"),
            ("weight-decay", "weight_decay"),
            ("loss-scale", "loss_scale"),
            ("iteration-time", "seconds"),
        ):
            self._tensorboard.add_scalar(tag, record[name], iteration)
        self._tensorboard.add_scalar("batch-size", record["global_batch_size"], iteration)
        self._tensorboard.add_scalar(
            "lm loss vs samples", record["lm_loss"], record["consumed_train_samples"]
        )

    def _print_line(self) -> None:
        """One line per interval, with Megatron's field names: other tools parse it."""
        records, self._interval = self._interval, []
        passed, self._passed = self._passed, []
        last = records[-1]
        applied = [r["lm_loss"] for r in records if not r["skipped"]]
        milliseconds = 1000.0 * sum(r["seconds"] for r in records) / len(records)
        fields = [
            f"iteration {last['iteration']:8d}/{self._resolved.train_iters:8d}",
            f"consumed samples: {last['consumed_train_samples']:12d}",
            f"elapsed time per iteration (ms): {milliseconds:.1f}",
            f"learning rate: {last['learning_rate']:.6E}",
            f"global batch size: {last['global_batch_size']:5d}",
            f"lm loss: {sum(applied) / len(applied) if applied else math.nan:.6E}",
            f"loss scale: {last['loss_scale']:.1f}",
            f"grad norm: {last['grad_norm']:.3f}",
            f"number of skipped iterations: {sum(r['skipped'] for r in records) + len(passed):3d}",
            f"number of nan iterations: {sum(not math.isfinite(r['lm_loss']) for r in records):3d}",
        ]
        stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
        get_logger().info(" [%s] %s |", stamp, " | ".join(fields))

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
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(f"lm loss {name}", loss, state.iteration)
            self._tensorboard.add_scalar(f"lm loss {name} ppl", perplexity, state.iteration)

    def close(self) -> None:
        """Write what is left and close the files."""
        self.flush()
        if self._records is not None:
            self._records.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
