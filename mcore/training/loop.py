"""The training loop: steps, and between them logging, evaluation, saving and leaving."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mcore.config.run import Resolved, RunConfig
from mcore.data.builder import DatasetGroup, Datasets
from mcore.data.gpt_dataset import SampleDataset
from mcore.data.provenance import build_sampler
from mcore.data.samplers import Sampler
from mcore.data.token_budget import BudgetedConversations
from mcore.errors import CheckpointError, NumericsError
from mcore.log import get_logger, warn_alike
from mcore.training import checkpointing
from mcore.training.autopilot import Autopilot, RollBack
from mcore.training.batches import BatchStream, build_stream
from mcore.training.checkpoint_writer import CheckpointWriter
from mcore.training.evaluation import Measurement, plan_measurement
from mcore.training.exits import Exits
from mcore.training.garbage import collect_if_due
from mcore.training.initialize import Runtime
from mcore.training.logging import RunLog
from mcore.training.memory_watch import MemoryWatch
from mcore.training.non_finite import broken_weights
from mcore.training.replica_check import check_replicas
from mcore.training.settling import settle
from mcore.training.setup import TrainState, follow_data_order
from mcore.training.step import StepFunctions
from mcore.training.token_budget import TokenBudgetLoader


@dataclass(slots=True)
class Run:
    """A run that is ready to train.

    Attributes:
        config: the whole configuration.
        resolved: batch arithmetic and length.
        runtime: groups and device.
        state: model, optimizer, schedule and progress.
        steps: training and evaluation step.
        datasets: training, validation and test.
        log: writes what happens.
        writer: writes checkpoints.
        memory: tells predicted and measured memory.
        exits: knows when to save out of turn, or to leave.
        autopilot: makes the training step, and knows which iterations have none.
        restore_from: the checkpoint that this run would go back to: a save root, or the directory
            of an iteration; None = there is none yet.
    """

    config: RunConfig
    resolved: Resolved
    runtime: Runtime
    state: TrainState
    steps: StepFunctions
    datasets: Datasets
    log: RunLog
    writer: CheckpointWriter
    memory: MemoryWatch
    exits: Exits
    autopilot: Autopilot
    restore_from: str | None = None
    _evaluated_at: int | None = None

    def resume_from(self, directory: Path) -> None:
        """Take note of the checkpoint that the state was loaded from."""
        options = self.config.checkpoint
        self.autopilot.load_state_dict(self.state.autopilot)
        if options.load_optim and not options.finetune:
            self.restore_from = str(directory)
            self.autopilot.checkpoint = self.state.iteration

    def train(self) -> None:
        """Train to the end, or until the run is to leave; saves, evaluates and logs on the way."""
        state, options = self.state, self.config.checkpoint
        train_set = self.datasets[0]
        assert train_set is not None
        streams = self._streams(train_set, state.consumed_train_samples)
        saved = state.iteration
        self.exits.ask()  # for signals that came while the run was set up
        self.log.restart_clock()
        try:
            if state.evaluation_is_owed:
                self.evaluate("valid", 1)
            while state.iteration < self.resolved.train_iters and not self.exits.leaving:
                if not self._advance(streams):
                    saved = state.iteration
                    continue
                self.memory.after_step(state.chunks, state.optimizer)
                if self._replica_check_is_due():
                    check_replicas(state.chunks, self.runtime.ctx, state.iteration)
                self.writer.poll()
                collect_if_due(self.config.runtime, state.iteration)
                self.exits.ask()
                if self._evaluation_is_due():
                    self.evaluate("valid", 1)
                if self._save_is_due() and self.save():
                    saved = state.iteration
                if self._exit_is_due():
                    get_logger().info("exiting at iteration %d (--exit-interval)", state.iteration)
                    break
            settle(state)  # may read the last batch again
        finally:
            close(streams)
        self.log.end_interval(state)
        for chunk in state.chunks:
            chunk.finish_param_sync()
        if options.save is not None and saved != state.iteration and not self.save():
            raise NumericsError(
                f"iteration {state.iteration}: the run ends with weights that are not finite, and "
                "nothing was saved since they were. Lower the learning rate, or look at "
                "--loss-spike-policy"
            )
        self._say_goodbye()

    def _advance(self, streams: list[BatchStream]) -> bool:
        """Bring the next iteration about; False where the run went back instead."""
        state = self.state
        why = self.autopilot.passes_over(state.iteration + 1)
        if why is not None:
            samples = self.steps.pass_over(state, streams)
            self.autopilot.passed_over(state, samples, why)
            self.log.passed_over(state, samples)
            return True
        result = self.autopilot.step(state, streams)
        if isinstance(result, RollBack):
            self._go_back(result, streams)
            return False
        self.log.step(state, result)
        self.exits.has_moved = True
        return True

    def _go_back(self, order: RollBack, streams: list[BatchStream]) -> None:
        assert self.restore_from is not None
        self.writer.wait()
        # Of what was to be done when the checkpoint was written this run has done its part.
        is_owed = self.state.evaluation_is_owed
        checkpointing.go_back(
            self.state,
            self.config,
            self.runtime.ctx,
            self.restore_from,
            self.writer.found_damaged,
        )
        self.state.evaluation_is_owed = is_owed
        follow_data_order(self.state, self.datasets[0])
        if self.state.iteration >= order.iteration:
            raise CheckpointError(
                f"{self.restore_from} was to take the run back from iteration {order.iteration}, "
                f"and its newest checkpoint is of iteration {self.state.iteration}; does another "
                "run save there?"
            )
        self.autopilot.rolled_back(order, self.state)
        for stream in streams:
            stream.seek(self.state.consumed_train_samples)
        self.log.rewind(self.state.iteration)
        self._evaluated_at = None

    def finish(self) -> None:
        """Measure the finished model, unless the loop has just done so."""
        if self._evaluated_at != self.state.iteration:
            self.evaluate("valid", 1)
        self.evaluate("test", 2)

    def _say_goodbye(self) -> None:
        self.log.progress("ended", self.state)
        if self.exits.reason is not None:
            get_logger().info(
                "exiting at iteration %d (%s)", self.state.iteration, self.exits.reason
            )
        if self.state.iteration < self.resolved.train_iters and self.config.checkpoint.save is None:
            warn_alike("the run ends early, and nothing is saved without --save")

    def evaluate(self, split: str, dataset: int) -> float | None:
        """Measure the loss on the validation (1) or test (2) set; training never notices.

        Returns:
            The loss, the mean over several sets. None where there is nothing to measure, and where
            the run leaves before the end; it is then owed to the resumed run.
        """
        samples = self.datasets[dataset]
        if samples is None or self.config.evaluation.eval_iters == 0:
            return None
        members = samples.members if isinstance(samples, DatasetGroup) else {None: samples}
        began = time.perf_counter()
        losses: dict[str | None, float] = {}
        for name, member in members.items():
            loss = self._measure(split, member)
            if loss is None:
                self.state.evaluation_is_owed = split == "valid"
                return None
            losses[name] = loss
        for name, loss in losses.items():
            self.log.evaluation(split, self.state, loss, name)
        self.log.phases({"evaluate": time.perf_counter() - began})
        if split == "valid":
            self._evaluated_at = self.state.iteration
            self.state.evaluation_is_owed = False
        self.log.restart_clock()
        return sum(losses.values()) / len(losses)

    def _measure(self, split: str, samples: SampleDataset) -> float | None:
        # A checkpoint that is only measured may be of a longer run than the data are sized for.
        iteration = min(self.state.iteration, self.resolved.train_iters)
        part = plan_measurement(split, samples, self.config, self.resolved, iteration)
        streams = self._streams(part.samples, part.first, part)
        try:
            return self.steps.evaluate(self.state.chunks, streams, part.iterations, self.exits.ask)
        finally:
            close(streams)

    def save(self) -> bool:
        """Write a checkpoint of the finished iteration; False where nobody could go on from it."""
        settle(self.state)
        self.log.flush()
        broken = broken_weights(self.state.chunks, self.runtime.ctx)
        if broken:
            warn_alike(
                "iteration %d is NOT SAVED, and older checkpoints are kept: not finite is %s",
                self.state.iteration,
                broken,
            )
            return False
        began = time.perf_counter()
        self.state.autopilot = self.autopilot.saving(self.state.iteration)
        checkpointing.save(self.state, self.config, self.runtime.ctx, self.writer)
        self.restore_from = self.config.checkpoint.save
        self.log.phases({"save-checkpoint": time.perf_counter() - began})
        self.log.progress("saved", self.state)
        self.log.restart_clock()
        return True

    def _streams(
        self, dataset: SampleDataset, consumed_samples: int, measured: Measurement | None = None
    ) -> list[BatchStream]:
        """What each chunk reads, in training or, where something is measured, in evaluation."""
        if isinstance(dataset, BudgetedConversations):
            return [self._budget_stream(dataset, consumed_samples) for _ in self.state.stages]
        return [
            build_stream(
                dataset,
                self._sampler(len(dataset), measured),
                consumed_samples=consumed_samples,
                num_workers=self.config.data.num_workers,
                seed=self.config.training.seed,
                device=self.runtime.device,
                reads_tokens=stage.reads_tokens or self.config.attention_reads_samples,
            )
            for stage in self.state.stages
        ]

    def _budget_stream(self, dataset: BudgetedConversations, consumed: int) -> BatchStream:
        dp = self.runtime.ctx.dp
        batch = self.resolved.global_batch_size
        loader = TokenBudgetLoader(dataset, batch, consumed, dp.rank, dp.size)
        return BatchStream(loader, self.config.training.seed, self.runtime.device)

    def _sampler(self, total_samples: int, measured: Measurement | None) -> Sampler:
        dp, data = self.runtime.ctx.dp, self.config.data
        micro_batch_size = self.resolved.micro_batch_size
        if measured is not None:
            micro_batch_size = self.resolved.eval_micro_batch_size
        if measured is not None and measured.is_whole:
            data = replace(data, dataloader_type="single")
        return build_sampler(data, total_samples, micro_batch_size, dp.rank, dp.size)

    def _save_is_due(self) -> bool:
        options, asked = self.config.checkpoint, self.exits.take_save()
        if asked and options.save is None:
            warn_alike("SIGUSR1: nothing is saved without --save")
            return False
        interval = options.save_interval
        return asked or (interval is not None and self.state.iteration % interval == 0)

    def _evaluation_is_due(self) -> bool:
        iteration, options = self.state.iteration, self.config.evaluation
        return iteration % options.eval_interval == 0 and iteration >= options.start_eval_at_iter

    def _replica_check_is_due(self) -> bool:
        interval = self.config.training.check_weight_hash_across_dp_replicas_interval
        return interval is not None and self.state.iteration % interval == 0

    def _exit_is_due(self) -> bool:
        interval = self.config.training.exit_interval
        return interval is not None and self.state.iteration % interval == 0


def close(streams: Sequence[BatchStream]) -> None:
    """End the reading threads of every stream."""
    for stream in streams:
        stream.close()
