"""What a pipeline rank can do: one computation of one model chunk on one microbatch.

A schedule is data: one plan a rank, a tuple of actions. As text, a plan is one line::

    F0.0 F0.1 B0.0 B0.1

`F0.1` is the forward of chunk 0 on microbatch 1. Where a plan has `W0.1`, `B0.1` computes the input
gradient only and `W0.1` the weight gradients; without it `B0.1` computes both. Communication is not
written down: it follows from the plans of all ranks (see `communication.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

from mcore.errors import ScheduleError


class Kind(str, Enum):
    """The computations that a plan may hold."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"

    __hash__ = str.__hash__  # Enum's own is Python code, and plans are looked up a great deal


class Action(NamedTuple):
    """One computation.

    Attributes:
        kind: forward, backward, or the weight-gradient part of a backward.
        chunk: the rank's own model chunk, 0 .. chunks a rank - 1 (Megatron's `vp_stage`).
        microbatch: 0 .. num_microbatches - 1.
    """

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"

    @property
    def described(self) -> str:
        """The action in full, for messages."""
        return f"{self} (chunk {self.chunk}, microbatch {self.microbatch})"


Plan: TypeAlias = tuple[Action, ...]

_TEXT = re.compile(r"([A-Z])(\d+)\.(\d+)")


def forward(chunk: int, microbatch: int) -> Action:
    """The forward of a chunk on a microbatch."""
    return Action(Kind.FORWARD, chunk, microbatch)


def backward(chunk: int, microbatch: int) -> Action:
    """The backward of a chunk on a microbatch."""
    return Action(Kind.BACKWARD, chunk, microbatch)


def weight(chunk: int, microbatch: int) -> Action:
    """The weight gradients of a chunk on a microbatch, put off until after its backward."""
    return Action(Kind.WEIGHT, chunk, microbatch)


def split_backwards(plan: Iterable[Action]) -> frozenset[tuple[int, int]]:
    """The (chunk, microbatch) pairs whose weight gradients are an action of their own."""
    return frozenset((a.chunk, a.microbatch) for a in plan if a.kind is Kind.WEIGHT)


def parse_action(text: str) -> Action:
    """The action that a text such as `F0.3` names.

    Raises:
        ScheduleError: the text is no action.
    """
    match = _TEXT.fullmatch(text.strip())
    kinds = {kind.value: kind for kind in Kind}
    if match is None or match[1] not in kinds:
        raise ScheduleError(
            f"{text.strip()!r} is no action: write KIND CHUNK.MICROBATCH without spaces, "
            f"such as F0.3, with KIND one of {', '.join(kinds)}"
        )
    return Action(kinds[match[1]], int(match[2]), int(match[3]))


def parse_plans(text: str) -> tuple[Plan, ...]:
    """The plans of all ranks, one line a rank, actions separated by spaces or commas.

    Empty lines, empty cells and lines that start with `#` are skipped. The inverse of
    `format_plans`.

    Raises:
        ScheduleError: a word is no action; the message says which line.
    """
    plans = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith("#"):
            continue
        try:
            plans.append(tuple(parse_action(word) for word in words))
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from error
    return tuple(plans)


def format_plan(plan: Iterable[Action]) -> str:
    """One rank's plan on one line."""
    return " ".join(map(str, plan))


def format_plans(plans: Sequence[Plan]) -> str:
    """All ranks' plans, one line a rank, in columns of equal width."""
    width = max((len(str(action)) for plan in plans for action in plan), default=0)
    lines = (" ".join(str(action).ljust(width) for action in plan).rstrip() for plan in plans)
    return "\n".join(lines)
