"""The stability autopilot: what is done about a step whose numbers are odd, and the account of it.

Every decision follows from numbers that all ranks have agreed on, so all ranks make it together.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from mcore.config.stability import StabilityConfig, parse_iterations
from mcore.errors import NumericsError
from mcore.topology.context import ParallelContext
from mcore.training.autopilot.account import Account, DocumentsOf
from mcore.training.autopilot.audit import AuditLog
from mcore.training.autopilot.detector import SpikeDetector
from mcore.training.autopilot.probe import Probe, in_words
from mcore.training.autopilot.watch import Finding, Watch
from mcore.training.batches import BatchStream
from mcore.training.non_finite import describe, find
from mcore.training.random_states import random_states, restore_random_states
from mcore.training.setup import TrainState
from mcore.training.step import StepFunctions, StepOutcome

_ABOVE = "grad_norm_above_threshold"


@dataclass(frozen=True, slots=True)
class RollBack:
    """The run is to return to its last checkpoint.

    Attributes:
        iteration: whose step was odd; its data and perhaps that before it is passed over.
        event: what the audit log says about it.
    """

    iteration: int
    event: dict[str, Any]


class Autopilot:
    """Makes the training step, and decides about it.

    Args:
        config: policy and limits.
        ctx: who decides together.
        steps: makes the step.
        audit: is told what was done; None on all ranks but one.
        documents: names a batch; asked where `audit` is.
        overflows: the loss scale is dynamic.

    Attributes:
        checkpoint: iteration of the checkpoint that a rollback would return to, or None.
    """

    def __init__(
        self,
        config: StabilityConfig,
        ctx: ParallelContext,
        steps: StepFunctions,
        audit: AuditLog | None,
        documents: DocumentsOf,
        overflows: bool = False,
    ) -> None:
        self._config, self._ctx, self._steps = config, ctx, steps
        self._account = Account(audit, documents)
        self._watch = Watch(config, ctx, overflows)
        self._detector = SpikeDetector(config)
        self._listed = parse_iterations(config.iterations_to_skip or ())
        self._windows: list[range] = []
        self._left_out = 0
        self._rollbacks = 0
        self._gained = False
        self._dip_ends = 0
        self.checkpoint: int | None = None

    # --- iterations without a step

    def passes_over(self, iteration: int) -> str | None:
        """Why an iteration is passed over, or None where it is not."""
        if any(iteration in window for window in self._listed):
            return "--iterations-to-skip"
        if any(iteration in window for window in self._windows):
            return "rollback"
        return None

    def passed_over(self, state: TrainState, samples: int, why: str) -> None:
        """Tell that the iteration that has just ended was passed over."""
        end = state.consumed_train_samples
        self._account.passed_over(state.iteration, range(end - samples, end), why)

    # --- the step

    def step(self, state: TrainState, streams: Sequence[BatchStream]) -> StepOutcome | RollBack:
        """Make the next step, or find that it must not count.

        Raises:
            NumericsError: on all ranks; the limits of what may be left out are reached.
        """
        self._set_rate(state)
        if self._config.loss_spike_policy == "off":
            return self._plain_step(state, streams)
        self._watch.limits = self._detector.limits()
        before = _Before(state) if self._config.rerun_mode == "validate_results" else None
        outcome = self._steps.attempt(state, streams, self._watch.judge)
        first = state.consumed_train_samples
        samples = range(first, first + outcome.global_batch_size)
        self._account.batch(state.iteration + 1, samples)
        finding = self._watch.read()
        facts: dict[str, Any] = {}
        if before is not None and not finding.is_finite:
            outcome, finding, facts = self._once_more(before, outcome, finding, state, streams)
        decision = self._decide(state, outcome, finding, facts)
        if isinstance(decision, RollBack):
            return decision
        self._steps.advance(state, outcome, is_judged=True)
        return outcome

    def _plain_step(self, state: TrainState, streams: Sequence[BatchStream]) -> StepOutcome:
        """The step where no policy looks at its numbers, but for the threshold of the norm."""
        has_threshold = self._config.grad_norm_skip_threshold is not None
        iteration, first = state.iteration + 1, state.consumed_train_samples
        outcome = self._steps.train(state, streams, self._watch.judge if has_threshold else None)
        self._account.batch(iteration, range(first, first + outcome.global_batch_size))
        if has_threshold:
            finding = self._watch.read()
            if finding.is_above_threshold:
                self._report(_ABOVE, "update left out", finding, {})
                self._count_left_out(iteration, {})
            else:
                self._left_out = 0
        return outcome

    def _decide(
        self, state: TrainState, outcome: StepOutcome, finding: Finding, facts: dict[str, Any]
    ) -> RollBack | None:
        kind = _kind(finding)
        if kind is None:
            self._left_out = 0
            if bool(outcome.applied):
                self._gained = True
                self._detector.observe(finding.loss, finding.grad_norm)
            return None
        policy = self._config.loss_spike_policy
        applied = kind == "spike" and policy == "report" and not finding.is_above_threshold
        returns = policy == "rollback" and kind != _ABOVE
        if returns and self.checkpoint is None:
            returns, facts = False, {**facts, "note": "there is no checkpoint to go back to"}
        action = "applied" if applied else "rollback" if returns else "update left out"
        if returns and self._rollbacks >= self._config.loss_spike_max_rollbacks:
            action = "none: the run has gone back often enough"
        event = self._report(kind, action, finding, facts)
        if applied:
            self._detector.observe(finding.loss, finding.grad_norm)
            return None
        if returns:
            self._count_rollback(state.iteration + 1, facts)
            return RollBack(state.iteration + 1, event)
        self._count_left_out(state.iteration + 1, facts)
        return None

    def _count_left_out(self, iteration: int, facts: Mapping[str, Any]) -> None:
        """Bound the updates that are left out one after another."""
        self._left_out += 1
        if self._left_out > self._config.loss_spike_max_skips:
            self._give_up(
                iteration,
                f"{self._left_out} consecutive updates were left out (--loss-spike-max-skips "
                f"{self._config.loss_spike_max_skips})",
                facts,
            )

    def _once_more(
        self,
        before: _Before,
        attempted: StepOutcome,
        first: Finding,
        state: TrainState,
        streams: Sequence[BatchStream],
    ) -> tuple[StepOutcome, Finding, dict[str, Any]]:
        """Attempt the step again: the same data, weights and random numbers."""
        facts = _found(attempted, state)
        before.restore(state, streams)
        probe = Probe(state.chunks, self._ctx)
        with probe.watching():
            outcome = self._steps.attempt(state, streams, self._watch.judge, probe)
        finding = self._watch.read()
        began = probe.first()
        if finding.is_finite:
            self._report("transient_fault", "step made again", first, facts)
            return outcome, finding, {}
        facts = {"fault": "persistent", **_found(outcome, state)}
        if began:
            facts["first"] = in_words(began)
        return outcome, finding, facts

    # --- rollback

    def rolled_back(self, order: RollBack, state: TrainState) -> None:
        """The run has returned to a checkpoint: settle which data is passed over.

        Args:
            order: the decision.
            state: as the checkpoint has it.
        """
        self.load_state_dict(state.autopilot)
        count = self._config.loss_spike_skip_iterations
        first = state.iteration + 1
        if count is not None:
            first = max(first, order.iteration - count + 1)
        self._windows.append(range(first, order.iteration + 1))
        if self._config.loss_spike_lr_dip < 1.0:
            self._dip_ends = order.iteration + self._config.loss_spike_lr_dip_iters
        self._left_out, self._gained = 0, False
        self._account.rolled_back(
            state.iteration,
            state.consumed_train_samples,
            self._windows[-1],
            order.event["event"],
        )

    def _count_rollback(self, iteration: int, facts: Mapping[str, Any]) -> None:
        """Bound the returns that bring nothing: a checkpoint with a new update ends the count."""
        self._rollbacks += 1
        if self._rollbacks > self._config.loss_spike_max_rollbacks:
            self._give_up(
                iteration,
                f"the run returned to a checkpoint {self._rollbacks - 1} times already without a "
                "new update in the checkpoints since (--loss-spike-max-rollbacks)",
                facts,
            )

    def _give_up(self, iteration: int, why: str, facts: Mapping[str, Any]) -> NoReturn:
        last = f" The last time it was {facts['found']}." if "found" in facts else ""
        raise NumericsError(
            f"iteration {iteration}: {why}.{last} Nothing was saved since the last checkpoint. "
            "Look at the data and documents in the autopilot's log, lower the learning rate, or go "
            "back further with --ckpt-step"
        )

    def tell_end(self, error: NumericsError, state: TrainState) -> None:
        """Write that the run ends by its numbers, whatever the policy, and send the alert.

        Args:
            error: ends the run.
            state: where it ends.
        """
        self._account.ended(state.iteration, str(error))

    def _set_rate(self, state: TrainState) -> None:
        left, length = self._dip_ends - state.iteration, self._config.loss_spike_lr_dip_iters
        factor = 1.0
        if 0 < left <= length:  # more are left where steps before the spike are made again
            factor -= (1.0 - self._config.loss_spike_lr_dip) * left / length
        state.scheduler.scale_lr(factor)

    # --- what a checkpoint keeps

    def saving(self, iteration: int) -> dict[str, Any]:
        """What a checkpoint of this iteration keeps, to which a rollback would return from now."""
        if self._gained:
            self._rollbacks, self._gained = 0, False
        self.checkpoint = iteration
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The detector's window, what was passed over and how often in vain, as plain data."""
        return {
            "detector": self._detector.state_dict(),
            "windows": [[window.start, window.stop - 1] for window in self._windows],
            "left_out": self._left_out,
            "rollbacks": self._rollbacks,
            "dip_ends": self._dip_ends,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; what is known to be passed over already stays known."""
        self._detector.load_state_dict(state.get("detector", {}))
        stored = [range(first, last + 1) for first, last in state.get("windows", ())]
        self._windows = stored + [window for window in self._windows if window not in stored]
        self._left_out = state.get("left_out", 0)
        self._rollbacks = max(self._rollbacks, state.get("rollbacks", 0))
        self._dip_ends = max(self._dip_ends, state.get("dip_ends", 0))

    def _report(
        self, kind: str, action: str, finding: Finding, facts: dict[str, Any]
    ) -> dict[str, Any]:
        return self._account.step(
            kind, action, finding, self._watch.limits, self._detector.medians(), facts
        )

    def close(self) -> None:
        """Close the audit log."""
        self._account.close()


class _Before:
    """What a step changes although its update is left out."""

    def __init__(self, state: TrainState) -> None:
        self._random = random_states()
        self._scaler = copy.copy(state.optimizer.grad_scaler)  # it replaces its tensors

    def restore(self, state: TrainState, streams: Sequence[BatchStream]) -> None:
        restore_random_states(self._random)
        state.optimizer.grad_scaler = self._scaler
        for stream in streams:
            stream.seek(state.consumed_train_samples)


def _kind(finding: Finding) -> str | None:
    if not finding.is_finite:
        return "non_finite"
    if finding.is_spike:
        return "spike"
    return _ABOVE if finding.is_above_threshold else None


def _found(outcome: StepOutcome, state: TrainState) -> dict[str, Any]:
    """Which losses and gradients of an attempt were not finite, and on which ranks; collective."""
    if outcome.evidence is None:
        return {}
    return {"found": describe(find(outcome.evidence, state.chunks))}
