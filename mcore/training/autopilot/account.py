"""What the autopilot says about its decisions: in the log, and on one rank to audit and alerts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore.log import get_logger, warn_alike
from mcore.training.autopilot.audit import AuditLog
from mcore.training.autopilot.detector import Limits
from mcore.training.autopilot.watch import Finding

#: Documents of a batch that a log line names.
_NAMED_DOCUMENTS = 8

#: From places in the run to the documents there, by corpus.
DocumentsOf = Callable[[range], dict[str, list[int]]]


class Account:
    """Tells what was decided, and about which batch.

    Args:
        audit: keeps it and sends alerts; None on all ranks but one.
        documents: names a batch; asked where `audit` is.
    """

    def __init__(self, audit: AuditLog | None, documents: DocumentsOf) -> None:
        self._audit, self._documents = audit, documents
        self._last_passed = 0
        self._batch: tuple[int, range] | None = None

    def batch(self, iteration: int, samples: range) -> None:
        """Take note of the batch of the present iteration; what ends the run is about it."""
        self._batch = (iteration, samples)

    def step(
        self,
        kind: str,
        action: str,
        finding: Finding,
        limits: Limits,
        medians: tuple[float, float] | None,
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        """Tell what was found in the present iteration and what is done about it.

        Args:
            kind: of event.
            action: in words.
            finding: its numbers.
            limits: that held for it.
            medians: loss and gradient norm of the steps before it, or None.
            facts: what else is known.

        Returns:
            The entry of the audit log.
        """
        if self._audit is None:
            return {"event": kind}
        details: dict[str, Any] = {
            "action": action,
            "loss": finding.loss,
            "grad_norm": finding.grad_norm,
            "limits": {"loss": limits.loss, "grad_norm": limits.grad_norm},
            **facts,
        }
        if medians is not None:
            details["medians"] = {"loss": medians[0], "grad_norm": medians[1]}
        place = self._place()
        get_logger().warning(
            "iteration %d: %s: loss %.6g, gradient norm %.6g: %s%s; documents %s",
            place["iteration"],
            kind.replace("_", " "),
            finding.loss,
            finding.grad_norm,
            action,
            f"; first in the {facts['first']}" if "first" in facts else "",
            _in_words(place["documents"]),
        )
        return self._audit.write(kind, **place, **details)

    def passed_over(self, iteration: int, samples: range, why: str) -> None:
        """Tell that an iteration was passed over."""
        if iteration - 1 != self._last_passed:
            get_logger().info("iteration %d is passed over (%s)", iteration, why)
        self._last_passed = iteration
        if self._audit is not None:
            ends = [samples.start, samples.stop - 1]
            self._audit.write(
                "passed_over", alert=False, iteration=iteration, samples=ends, why=why
            )

    def rolled_back(self, checkpoint: int, consumed: int, window: range, because: str) -> None:
        """Tell that the run has returned to a checkpoint.

        Args:
            checkpoint: its iteration.
            consumed: its consumed samples.
            window: iterations that are passed over, the odd one last.
            because: kind of event.
        """
        first, last = window.start, window.stop - 1
        warn_alike(
            "BACK to iteration %d; the data of iterations %d to %d is passed over",
            checkpoint,
            first,
            last,
        )
        if self._audit is not None:
            self._audit.write(
                "rollback",
                iteration=last,
                checkpoint=checkpoint,
                consumed_train_samples=consumed,
                passed_over=[first, last],
                because=because,
            )

    def ended(self, iteration: int, why: str) -> None:
        """Tell that the run ends by its numbers, whatever the policy.

        Args:
            iteration: finished iterations.
            why: message of the error.
        """
        if self._audit is not None:
            place = {"iteration": iteration} if self._batch is None else self._place()
            self._audit.write("give_up", **place, why=why)

    def close(self) -> None:
        """Close the audit log."""
        if self._audit is not None:
            self._audit.close()

    def _place(self) -> dict[str, Any]:
        """Iteration, samples and documents of the present batch."""
        assert self._batch is not None, "no batch was noted"
        iteration, samples = self._batch
        return {
            "iteration": iteration,
            "samples": [samples.start, samples.stop - 1],
            "documents": self._documents(samples),
        }


def _in_words(documents: dict[str, list[int]]) -> str:
    parts = []
    for prefix, numbers in documents.items():
        some = ", ".join(map(str, numbers[:_NAMED_DOCUMENTS]))
        more = len(numbers) - _NAMED_DOCUMENTS
        parts.append(f"{some}{f' and {more} more' if more > 0 else ''} of {prefix}")
    return "; ".join(parts)
