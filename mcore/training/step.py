"""One training step, and one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore.config.run import Resolved
from mcore.device import HostRead
from mcore.distributed import DataParallelModule, finalize_model_grads
from mcore.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    NumMicroBatchesCalculator,
)
from mcore.pipeline_parallel.executor import ForwardStepFunc
from mcore.pipeline_parallel.hooks import Observer, ScheduleHooks, Unobserved
from mcore.pipeline_parallel.schedules import get_forward_backward_func
from mcore.training.batches import BatchStream
from mcore.training.gradient_probe import GradientProbe
from mcore.training.initialize import Runtime
from mcore.training.loss_records import reduce_loss
from mcore.training.non_finite import Evidence, can_see_own_gradients
from mcore.training.observation import Observation
from mcore.training.settling import settle
from mcore.training.setup import TrainState, UnsettledUpdate


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step computed; tensors stay on the device until they are logged.

    Attributes:
        loss: mean loss over the valid tokens of the global batch, float64 scalar.
        grad_norm: L2 norm of that loss's gradient before clipping, float64 scalar.
        num_tokens: valid tokens of the global batch, float64 scalar.
        applied: whether the update was made, bool scalar (not where a gradient was not finite, or
            the update was vetoed).
        learning_rate: the rate that this step applied.
        weight_decay: the decay that this step applied.
        loss_scale: what the loss was multiplied by.
        watched: scalars that options ask for, by their name in the record.
        global_batch_size: samples of the step.
        sequences: rows of the step's micro batches, over all ranks.
        data_wait: seconds in which this rank waited for them.
        evidence: where a number that is not finite came from, or None where nobody asks.
    """

    loss: Tensor
    grad_norm: Tensor
    num_tokens: Tensor
    applied: Tensor
    learning_rate: float
    weight_decay: float
    loss_scale: Tensor
    global_batch_size: int
    watched: Mapping[str, Tensor]
    sequences: int
    data_wait: float
    evidence: Evidence | None = None


#: From loss and gradient norm of a step, float64 scalars, to a bool scalar, equal on all ranks:
#: leave the update out.
StepVeto = Callable[[Tensor, Tensor], Tensor]


class StepFunctions:
    """The training step and the evaluation step of one run.

    Args:
        forward_step: the user's `(data_iterator, model) -> (output, loss_func)`.
        resolved: batch arithmetic.
        runtime: groups and device.
        batch_sizes: the global batch size of each training step; that of `resolved` when None.
        observation: looks at every training step.
        looks_for_nan: take down what tells where a number became NaN or infinite.
        notes_gradients: of every step, gradients too: one pass over them.
    """

    def __init__(
        self,
        forward_step: ForwardStepFunc,
        resolved: Resolved,
        runtime: Runtime,
        batch_sizes: NumMicroBatchesCalculator | None = None,
        observation: Observation | None = None,
        *,
        looks_for_nan: bool = False,
        notes_gradients: bool = True,
    ) -> None:
        self._observation = observation or Observation()
        self._looks_for_nan, self._notes_gradients = looks_for_nan, notes_gradients
        self._batch_sizes = batch_sizes or ConstantNumMicroBatchesCalculator(
            resolved.global_batch_size, resolved.micro_batch_size, resolved.data_parallel_size
        )
        self._forward_step = forward_step
        self._resolved = resolved
        self._runtime = runtime
        self._schedule = get_forward_backward_func(schedule=runtime.pipeline.schedule)
        # Dividing before backward keeps low-precision gradients in range; finalize multiplies back.
        self._denominator = float(resolved.global_batch_size * resolved.seq_length)

    def train(
        self, state: TrainState, streams: Sequence[BatchStream], veto: StepVeto | None = None
    ) -> StepOutcome:
        """One optimizer update over the global batch; every rank of the job takes part.

        The loss is a sum over tokens divided once by the number of valid tokens of the global
        batch.

        Args:
            state: what is trained.
            streams: what each chunk reads.
            veto: may leave the update out.
        """
        outcome = self.attempt(state, streams, veto)
        self.advance(state, outcome)
        return outcome

    def next_batch_size(self, state: TrainState) -> int:
        """Samples of the coming step."""
        self._batch_sizes.update(state.consumed_train_samples, verbose=True)
        return self._batch_sizes.get_current_running_global_batch_size()

    def attempt(
        self,
        state: TrainState,
        streams: Sequence[BatchStream],
        veto: StepVeto | None = None,
        closely: Observer | None = None,
    ) -> StepOutcome:
        """The step but for its progress: where no update was made, it can be attempted again.

        Args:
            state: what is trained.
            streams: what each chunk reads.
            veto: may leave the update out.
            closely: sees every action, and gradients are looked at after each backward.
        """
        samples = self.next_batch_size(state)
        self._observation.before_step(state.iteration)
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        for stream in streams:
            stream.iteration = state.iteration + 1
        loss_scale = state.optimizer.get_loss_scale()
        looks = self._looks_for_nan or closely is not None
        evidence = Evidence(self._runtime.ctx) if looks else None
        probe = None
        if evidence is not None and closely is not None:
            probe = GradientProbe(evidence, state.chunks, closely)
        microbatches, hooks = self._batch_sizes.get(), self._hooks(state, evidence, probe)
        held = nullcontext() if probe is None else probe.watching()
        with self._observation.phase("forward-backward"), held:
            records = self._run(state.chunks, streams, hooks, microbatches)
        loss, num_tokens = reduce_loss(records, self._runtime)
        if evidence is not None:
            consumed = state.consumed_train_samples
            evidence.look_again = partial(
                self._look_again, state, streams, microbatches, state.iteration + 1, consumed
            )
        settle(state)
        learning_rate, weight_decay = applied_rates(state)
        with self._observation.phase("optimizer"):
            judge = None if veto is None else partial(veto, loss)
            update = state.optimizer.step(judge, self._observation.phase)
        data_wait = sum(stream.take_wait() for stream in streams)
        self._observation.after_step(state.iteration + 1, data_wait)
        return StepOutcome(
            loss=loss,
            grad_norm=update.grad_norm,
            num_tokens=num_tokens,
            applied=update.update_successful,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            loss_scale=loss_scale,
            global_batch_size=samples,
            watched={
                name: value
                for name, value in (
                    ("num_zeros", update.num_zeros_in_grad),
                    ("params_norm", update.params_norm),
                )
                if value is not None
            },
            sequences=microbatches * self._resolved.micro_batch_size * self._runtime.ctx.dp.size,
            data_wait=data_wait,
            evidence=evidence,
        )

    def advance(self, state: TrainState, outcome: StepOutcome, *, is_judged: bool = False) -> None:
        """The step is done: it counts, with or without an update.

        Args:
            state: what is trained.
            outcome: of the step.
            is_judged: what to do about numbers that are not finite has been decided.
        """
        samples = outcome.global_batch_size
        evidence = None if is_judged else outcome.evidence
        facts = HostRead(
            outcome.applied,
            outcome.grad_norm,
            outcome.loss,
            state.optimizer.grad_scaler.is_stuck,
        )
        state.unsettled = UnsettledUpdate(facts, samples, evidence)
        state.iteration += 1
        state.consumed_train_samples += samples

    def pass_over(self, state: TrainState, streams: Sequence[BatchStream]) -> int:
        """Let an iteration go by without computing anything; the number of its samples."""
        settle(state)
        samples = self.next_batch_size(state)
        state.iteration += 1
        state.consumed_train_samples += samples
        state.skipped_iterations += 1
        state.skipped_train_samples += samples
        state.passed_over_samples += samples
        for stream in streams:
            stream.seek(state.consumed_train_samples)
        return samples

    @torch.no_grad()
    def evaluate(
        self,
        chunks: Sequence[DataParallelModule],
        streams: Sequence[BatchStream],
        iterations: int,
        leave: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Mean loss over the valid tokens of `iterations` global batches; changes nothing.

        Args:
            chunks: the model.
            streams: what each chunk reads.
            iterations: global batches.
            leave: asked before each of them, with the same answer on all ranks.

        Returns:
            The loss; None when told to leave.
        """
        for chunk in chunks:
            chunk.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self._runtime.device)
        hooks = ScheduleHooks(observer=self._observation.evaluation_observer())
        done = 0
        while done < iterations and not leave():
            records = self._run(
                chunks,
                streams,
                hooks,
                self._resolved.eval_num_microbatches,
                forward_only=True,
            )
            loss, num_tokens = reduce_loss(records, self._runtime)
            total += torch.stack([loss * num_tokens, num_tokens])
            done += 1
        for chunk in chunks:
            chunk.train()
        return None if done < iterations else float(total[0] / total[1])

    def _run(
        self,
        chunks: Sequence[DataParallelModule],
        streams: Sequence[BatchStream],
        hooks: ScheduleHooks,
        num_microbatches: int,
        forward_only: bool = False,
    ) -> list[Any]:
        interleaved = len(chunks) > 1
        return self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=list(streams) if interleaved else streams[0],
            model=list(chunks) if interleaved else chunks[0],
            num_microbatches=num_microbatches,
            seq_length=self._resolved.seq_length,
            micro_batch_size=(
                self._resolved.eval_micro_batch_size
                if forward_only
                else self._resolved.micro_batch_size
            ),
            forward_only=forward_only,
            hooks=hooks,
        )

    def _look_again(
        self,
        state: TrainState,
        streams: Sequence[BatchStream],
        microbatches: int,
        iteration: int,
        consumed: int,
    ) -> Evidence:
        """Gradients of a step's microbatches after each backward; see `Evidence.look_again`."""
        evidence = Evidence(self._runtime.ctx)
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        for stream in streams:
            stream.seek(consumed)
            stream.iteration = iteration
        probe = GradientProbe(evidence, state.chunks, Unobserved())
        with probe.watching():
            self._run(state.chunks, streams, self._hooks(state, evidence, probe), microbatches)
        return evidence

    def _hooks(
        self, state: TrainState, evidence: Evidence | None, probe: GradientProbe | None
    ) -> ScheduleHooks:
        chunks = state.chunks
        sums = evidence if probe is not None or self._notes_gradients else None
        # After the last backward a probe looks anyway, and knows the microbatch.
        own = sums if probe is None and can_see_own_gradients(chunks[0]) else None

        def scale_loss(loss: Tensor) -> Tensor:
            if evidence is not None:
                evidence.note_loss(loss)
            return state.optimizer.scale_loss(loss / self._denominator)

        def start_grad_sync(chunk: int) -> None:
            if own is not None:
                own.note_own_gradients([chunks[chunk]])
            if probe is not None:
                probe.look(chunk)
            chunks[chunk].start_grad_sync()

        def finalize_grads(num_tokens: Tensor) -> None:
            with self._observation.phase("all-grads-sync"):
                finalize_model_grads(
                    chunks,
                    num_tokens,
                    loss_denominator=self._denominator,
                    context=self._runtime.ctx,
                )
            if sums is not None and own is None:
                sums.note_sums(chunks)

        return ScheduleHooks(
            no_sync=lambda chunk: chunks[chunk].no_sync(),
            start_grad_sync=start_grad_sync,
            scale_loss=scale_loss,
            finalize_grads=finalize_grads,
            observer=self._observation.observer() if probe is None else probe,
        )


def applied_rates(state: TrainState) -> tuple[float, float]:
    """Learning rate and weight decay that the coming step applies, before group multipliers."""
    scheduler = state.scheduler
    group = next((g for g in state.optimizer.param_groups if g["params"]), None)
    lr = scheduler.get_lr(group if group is not None else {})
    return lr, scheduler.get_wd()
