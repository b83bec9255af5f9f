"""When each rank posts its sends and receives: derived from the plans of all ranks, once.

The rule has to be right on a backend that runs a rank's communication strictly in the order in
which it was posted (NCCL: one stream a communicator, one kernel a batch), that matches the messages
of a pair of ranks by their order alone (no tags), and where nothing is buffered: a send ends when
its receive has been posted.

Every message gets a *slot*: the time at which its producer ends under nominal costs
(`nominal_ends`). A rank's messages of one slot are one batch; each rank posts its batches in the
order of slots.

- No deadlock: take the earliest slot that is unfinished. What its producers need was produced in
  earlier slots, and all that any rank has posted before it belongs to earlier slots too, so its
  sends and receives get posted and nothing stands before them.
- No ambiguity: a rank ends one action at a time, so between two ranks and in one direction a slot
  holds at most one message; both ends post these in the order of slots. That covers pp = 2, where
  activations and gradients of several chunks travel between the same two ranks.
- Overlap: a batch with a send is posted as soon as the send exists and is not waited for; a batch
  of receives only is posted one action ahead of its consumer. Two tensors that are exchanged
  (activation against gradient, the steady state of 1F1B) share a slot and thus a batch.

The order of slots is a matter of correctness, the costs only of speed: any costs give an order that
cannot deadlock. `simulate.py` checks all of this without use of the argument above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mcore.pipeline_parallel.actions import Action, Plan
from mcore.pipeline_parallel.messages import (
    Message,
    check_plans,
    incoming,
    nominal_ends,
    outgoing,
)
from mcore.topology.placement import StagePlacement

# Receives are posted before the action that comes before their consumer, so that the transfer runs
# beside that action; further ahead would only hold buffers.
RECEIVE_AHEAD = 1

# A rank that only sends would go on as long as it has something to compute, and hold every tensor
# that its peer has not asked for. It posts no further batch before all but this many minus one of
# those are done.
SENDS_UNDER_WAY = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Sends and receives of one rank that are posted together and run at the same time."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


Program: TypeAlias = tuple[Action | Batch, ...]
"""What one rank does: compute an action, or post a batch. An action first waits for its message."""


def plan_communication(plans: Sequence[Plan], placement: StagePlacement) -> tuple[Program, ...]:
    """Each rank's plan with the batches to post between its actions.

    Args:
        plans: the plan of each pipeline rank.
        placement: where the stages live.

    Returns:
        One program a rank. Messages within a rank appear in no batch.

    Raises:
        ScheduleError: a plan is wrong or the plans wait for each other in a circle, with the rank,
            the action and the reason.
    """
    check_plans(plans, placement)
    ends = nominal_ends(plans, placement)
    end_of = {
        (rank, action): end
        for rank, plan in enumerate(plans)
        for action, end in zip(plan, ends[rank], strict=True)
    }
    return tuple(_program(rank, plan, placement, end_of) for rank, plan in enumerate(plans))


def _program(
    rank: int,
    plan: Plan,
    placement: StagePlacement,
    end_of: dict[tuple[int, Action], int],
) -> Program:
    batches: dict[int, Batch] = {}  # by slot
    wish: dict[int, int] = {}  # slot of receives only -> the gap at which to post them
    sent_at: dict[int, int] = {}  # slot with a send -> the gap, right after the producer
    for index, action in enumerate(plan):
        message = incoming(placement, rank, action)
        if message is not None and not message.is_local:
            slot = end_of[message.source, message.producer]
            before = batches.get(slot, Batch())
            batches[slot] = Batch(before.sends, (*before.receives, message))
            wish[slot] = min(wish.get(slot, index), max(0, index - RECEIVE_AHEAD))
        message = outgoing(placement, rank, action)
        if message is not None and not message.is_local:
            slot = end_of[rank, action]
            before = batches.get(slot, Batch())
            batches[slot] = Batch((message,), before.receives)
            sent_at[slot] = index + 1
    gaps: list[list[Batch]] = [[] for _ in range(len(plan) + 1)]
    for slot, gap in _gaps(sorted(batches), wish, sent_at).items():
        gaps[gap].append(batches[slot])
    program: list[Action | Batch] = []
    for posts, action in zip(gaps, plan, strict=False):
        program += [*posts, action]
    return (*program, *gaps[-1])


def _gaps(slots: list[int], wish: dict[int, int], sent_at: dict[int, int]) -> dict[int, int]:
    """At which gap (before the action of that index) each slot is posted; never out of order."""
    gap_of: dict[int, int] = {}
    earliest = 0
    for slot in slots:
        if slot in sent_at:
            earliest = gap_of[slot] = sent_at[slot]
        else:
            gap_of[slot] = max(earliest, wish[slot])
    latest = max(gap_of.values(), default=0)
    for slot in reversed(slots):
        latest = gap_of[slot] = min(latest, gap_of[slot])
    return gap_of
