"""The stability autopilot: what is done about a step whose numbers are odd, and the account of it.

Every decision follows from numbers that all ranks have agreed on, so all ranks make it together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mcore.config.stability import StabilityConfig, parse_iterations
from mcore.errors import NumericsError
from mcore.log import get_logger
from mcore.topology.context import ParallelContext
from mcore.training.autopilot.audit import AuditLog
from mcore.training.autopilot.detector import SpikeDetector
from mcore.training.autopilot.probe import Probe
from mcore.training.autopilot.watch import Finding, Watch
from mcore.training.batches import BatchStream
from mcore.training.non_finite import describe, find
from mcore.training.random_states import random_states, restore_random_states
from mcore.training.setup import TrainState
from mcore.training.step import StepFunctions, StepOutcome

#: Documents of a batch that a log line names.
_NAMED_DOCUMENTS = 8

#: From places in the run to the documents there, by corpus.
DocumentsOf = Callable[[range], dict[str, list[int]]]


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
        self._audit, self._documents = audit, documents
        self._watch = Watch(config, ctx, overflows)
        self._detector = SpikeDetector(config)
        self._listed = parse_iterations(config.iterations_to_skip or ())
        self._windows: list[range] = []
        self._last_passed = 0
        self._left_out = 0
        self._rollbacks: dict[int, int] = {}
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
        if state.iteration - 1 != self._last_passed:
            get_logger().info("iteration %d is passed over (%s)", state.iteration, why)
        self._last_passed = state.iteration
        if self._audit is not None:
            end = state.consumed_train_samples
            place: dict[str, Any] = {
                "iteration": state.iteration,
                "samples": [end - samples, end - 1],
            }
            self._audit.write("passed_over", alert=False, **place, why=why)

    # --- the step

    def step(self, state: TrainState, streams: Sequence[BatchStream]) -> StepOutcome | RollBack:
        """Make the next step, or find that it must not count.

        Raises:
            NumericsError: on all ranks; the limits of what may be left out are reached.
        """
        self._set_rate(state)
        if self._config.loss_spike_policy == "off":
            judges = self._config.grad_norm_skip_threshold is not None
            return self._steps.train(state, streams, self._watch.judge if judges else None)
        self._watch.limits = self._detector.limits()
        before = _Before(state) if self._config.rerun_mode == "validate_results" else None
        outcome = self._steps.attempt(state, streams, self._watch.judge)
        finding = self._watch.read()
        facts: dict[str, Any] = {}
        if before is not None and not finding.is_finite:
            outcome, finding, facts = self._once_more(before, outcome, finding, state, streams)
        decision = self._decide(state, outcome, finding, facts)
        if isinstance(decision, RollBack):
            return decision
        self._steps.advance(state, outcome, is_judged=True)
        return outcome

    def _decide(
        self, state: TrainState, outcome: StepOutcome, finding: Finding, facts: dict[str, Any]
    ) -> RollBack | None:
        kind = _kind(finding)
        if kind is None:
            self._left_out = 0
            if bool(outcome.applied):
                self._detector.observe(finding.loss, finding.grad_norm)
            return None
        policy = self._config.loss_spike_policy
        applied = kind == "spike" and policy == "report" and not finding.is_above_threshold
        returns = policy == "rollback" and kind != "grad_norm_above_threshold"
        if returns and self.checkpoint is None:
            returns, facts = False, {**facts, "note": "there is no checkpoint to go back to"}
        action = "applied" if applied else "rollback" if returns else "update left out"
        samples = range(
            state.consumed_train_samples,
            state.consumed_train_samples + outcome.global_batch_size,
        )
        event = self._report(kind, action, state.iteration + 1, samples, finding, facts)
        if applied:
            self._detector.observe(finding.loss, finding.grad_norm)
            return None
        if returns:
            self._count_rollback(state.iteration + 1)
            return RollBack(state.iteration + 1, event)
        self._left_out += 1
        if self._left_out > self._config.loss_spike_max_skips:
            self._give_up(
                state.iteration + 1,
                f"{self._left_out} consecutive updates were left out (--loss-spike-max-skips "
                f"{self._config.loss_spike_max_skips})",
            )
        return None

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
        where = probe.first()
        if finding.is_finite:
            samples = range(
                state.consumed_train_samples,
                state.consumed_train_samples + outcome.global_batch_size,
            )
            self._report(
                "transient_fault", "step made again", state.iteration + 1, samples, first, facts
            )
            return outcome, finding, {}
        facts = {"fault": "persistent", **_found(outcome, state)}
        if where is not None:
            facts["first"] = where.in_words()
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
        self._left_out = 0
        get_logger().warning(
            "BACK to iteration %d; the data of iterations %d to %d is passed over",
            state.iteration,
            first,
            order.iteration,
        )
        if self._audit is not None:
            self._audit.write(
                "rollback",
                iteration=order.iteration,
                checkpoint=state.iteration,
                consumed_train_samples=state.consumed_train_samples,
                passed_over=[first, order.iteration],
                because=order.event["event"],
            )

    def _count_rollback(self, iteration: int) -> None:
        assert self.checkpoint is not None
        count = self._rollbacks.get(self.checkpoint, 0) + 1
        self._rollbacks[self.checkpoint] = count
        if count > self._config.loss_spike_max_rollbacks:
            self._give_up(
                iteration,
                f"the run returned to the checkpoint of iteration {self.checkpoint} "
                f"{count - 1} times already (--loss-spike-max-rollbacks)",
            )

    def _give_up(self, iteration: int, why: str) -> None:
        if self._audit is not None:
            self._audit.write("give_up", iteration=iteration, why=why)
        raise NumericsError(
            f"iteration {iteration}: {why}. Nothing was saved since the last checkpoint. Look at "
            "the data and documents in the autopilot's log, lower the learning rate, or go back "
            "further with --ckpt-step"
        )

    def _set_rate(self, state: TrainState) -> None:
        left, length = self._dip_ends - state.iteration, self._config.loss_spike_lr_dip_iters
        factor = 1.0
        if 0 < left <= length:  # more are left where steps before the spike are made again
            factor -= (1.0 - self._config.loss_spike_lr_dip) * left / length
        state.scheduler.scale_lr(factor)

    # --- what a checkpoint keeps

    def state_dict(self) -> dict[str, Any]:
        """The detector's window and what was passed over, as plain data."""
        return {
            "detector": self._detector.state_dict(),
            "windows": [[window.start, window.stop - 1] for window in self._windows],
            "left_out": self._left_out,
            "dip_ends": self._dip_ends,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; what is known to be passed over already stays known."""
        self._detector.load_state_dict(state.get("detector", {}))
        stored = [range(first, last + 1) for first, last in state.get("windows", ())]
        self._windows = stored + [window for window in self._windows if window not in stored]
        self._left_out = state.get("left_out", 0)
        self._dip_ends = max(self._dip_ends, state.get("dip_ends", 0))

    # --- telling

    def _report(
        self,
        kind: str,
        action: str,
        iteration: int,
        samples: range,
        finding: Finding,
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        """Write log line, audit entry and alert about a step."""
        limits, medians = self._watch.limits, self._detector.medians()
        details: dict[str, Any] = {
            "action": action,
            "loss": finding.loss,
            "grad_norm": finding.grad_norm,
            "limits": {"loss": limits.loss, "grad_norm": limits.grad_norm},
            **facts,
        }
        if medians is not None:
            details["medians"] = {"loss": medians[0], "grad_norm": medians[1]}
        if self._audit is None:
            return {"event": kind}
        place: dict[str, Any] = {
            "iteration": iteration,
            "samples": [samples.start, samples.stop - 1],
        }
        documents = self._documents(samples)
        get_logger().warning(
            "iteration %d: %s: loss %.6g, gradient norm %.6g: %s%s; documents %s",
            iteration,
            kind.replace("_", " "),
            details["loss"],
            details["grad_norm"],
            details["action"],
            f"; first in the {details['first']}" if "first" in details else "",
            _in_words(documents),
        )
        return self._audit.write(kind, **place, **details, documents=documents)

    def close(self) -> None:
        """Close the audit log."""
        if self._audit is not None:
            self._audit.close()


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
    return "grad_norm_above_threshold" if finding.is_above_threshold else None


def _found(outcome: StepOutcome, state: TrainState) -> dict[str, Any]:
    """Which losses and gradients of an attempt were not finite, and on which ranks; collective."""
    if outcome.evidence is None:
        return {}
    return {"found": describe(find(outcome.evidence, state.chunks))}


def _in_words(documents: dict[str, list[int]]) -> str:
    parts = []
    for prefix, numbers in documents.items():
        some = ", ".join(map(str, numbers[:_NAMED_DOCUMENTS]))
        more = len(numbers) - _NAMED_DOCUMENTS
        parts.append(f"{some}{f' and {more} more' if more > 0 else ''} of {prefix}")
    return "; ".join(parts)
