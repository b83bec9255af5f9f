"""What the plans of all ranks imply: who needs what from whom, and whether that can be had.

A forward needs the output of the stage before, a backward the gradient from the stage after; weight
gradients need nothing from elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from mcore.errors import ScheduleError
from mcore.pipeline_parallel.actions import Action, Kind, Plan, split_backwards
from mcore.topology.placement import Location, StagePlacement


class Message(NamedTuple):
    """One tensor that passes between two stages: an activation or its gradient.

    Attributes:
        producer: the action, on rank `source`, whose result it is.
        source: pipeline rank.
        consumer: the action, on rank `destination`, that needs it.
        destination: pipeline rank; the same as `source` where both stages live on one rank: then
            the tensor is handed over locally.
    """

    producer: Action
    source: int
    consumer: Action
    destination: int

    @property
    def is_local(self) -> bool:
        """Whether no communication is needed."""
        return self.source == self.destination

    def __str__(self) -> str:
        return f"{self.producer}@{self.source}->{self.consumer}@{self.destination}"


def incoming(placement: StagePlacement, rank: int, action: Action) -> Message | None:
    """The message that an action of a rank needs first; None at the ends of the chain."""
    if action.kind is Kind.WEIGHT:
        return None
    upstream = placement.prev if action.kind is Kind.FORWARD else placement.next
    peer = upstream(rank, action.chunk)
    if peer is None:
        return None
    return Message(_at(action, peer), peer.rank, action, rank)


def outgoing(placement: StagePlacement, rank: int, action: Action) -> Message | None:
    """The message that an action of a rank produces; None at the ends of the chain."""
    if action.kind is Kind.WEIGHT:
        return None
    downstream = placement.next if action.kind is Kind.FORWARD else placement.prev
    peer = downstream(rank, action.chunk)
    if peer is None:
        return None
    return Message(action, rank, _at(action, peer), peer.rank)


def check_plans(plans: Sequence[Plan], placement: StagePlacement, *, trains: bool = False) -> int:
    """Check each plan by itself.

    Every (chunk, microbatch) of every rank has one forward, then one backward and perhaps, after
    that, its weight gradients; in an evaluation, one forward. The microbatches are 0 .. m-1, the
    same on all ranks, and the forwards of a chunk are in that order, in which it reads its data.

    Args:
        plans: the plan of each pipeline rank.
        placement: where the stages live.
        trains: the plans are for training; otherwise plans of forwards alone are an evaluation's.

    Returns:
        The number of microbatches m.

    Raises:
        ScheduleError: with the rank, the action and the reason.
    """
    if len(plans) != placement.num_ranks:
        raise ScheduleError(f"{placement.num_ranks} plans are needed, one a rank, got {len(plans)}")
    num_microbatches = 1 + max((a.microbatch for plan in plans for a in plan), default=-1)
    if num_microbatches == 0:
        raise ScheduleError("the plans are empty: at least one microbatch is needed")
    actions = min(map(len, plans))
    if num_microbatches > actions:
        rank, last = max(
            ((rank, a) for rank, plan in enumerate(plans) for a in plan),
            key=lambda found: found[1].microbatch,
        )
        reason = f"a rank has {actions} actions, too few for {num_microbatches} microbatches"
        raise refusal(rank, last, reason)
    kinds = {action.kind for plan in plans for action in plan} - {Kind.WEIGHT}
    kinds |= {Kind.FORWARD, Kind.BACKWARD} if trains else {Kind.FORWARD}
    for rank, plan in enumerate(plans):
        counts = Counter(plan)
        wanted = {
            Action(kind, chunk, microbatch)
            for kind in kinds
            for chunk in range(placement.num_chunks)
            for microbatch in range(num_microbatches)
        }
        for action in plan:
            if action.kind is not Kind.WEIGHT and action not in wanted:
                raise refusal(rank, action, f"the rank has chunks 0 .. {placement.num_chunks - 1}")
            if counts[action] > 1:
                raise refusal(rank, action, f"it is planned {counts[action]} times, not once")
        for action in sorted(wanted.difference(counts), key=str):
            raise refusal(rank, action, "it is missing from the plan")
        _check_order(rank, plan)
    return num_microbatches


#: Times that messages are put in order by. Nothing depends on them but speed: under other costs a
#: message may have to wait for one that was expected before it. With equal times for F, B and W
#: many messages would tie; these break the ties as real times do, where W is the shortest.
_NOMINAL = {Kind.FORWARD: 100, Kind.BACKWARD: 101, Kind.WEIGHT: 99}


def nominal_ends(plans: Sequence[Plan], placement: StagePlacement) -> tuple[list[int], ...]:
    """When each action ends under `_NOMINAL` costs, if a message takes no time.

    Args:
        plans: checked plans of all ranks.
        placement: where the stages live.

    Returns:
        For each rank, the end time of each action of its plan.

    Raises:
        ScheduleError: the plans wait for each other in a circle; it names the first rank that can
            never go on, the action and what it waits for.
    """
    ended: dict[tuple[int, Action], int] = {}
    ends: tuple[list[int], ...] = tuple([] for _ in plans)
    inputs = [[incoming(placement, rank, a) for a in plan] for rank, plan in enumerate(plans)]
    splits = list(map(split_backwards, plans))
    progress = True
    while progress:
        progress = False
        for rank, plan in enumerate(plans):
            mine = ends[rank]
            while len(mine) < len(plan):
                action, message = plan[len(mine)], inputs[rank][len(mine)]
                arrival = 0
                if message is not None:
                    known = ended.get((message.source, message.producer))
                    if known is None:
                        break
                    arrival = known
                start = max(arrival, mine[-1] if mine else 0)
                mine.append(start + _nominal_cost(action, splits[rank]))
                ended[rank, action] = mine[-1]
                progress = True
    for rank, plan in enumerate(plans):
        if len(ends[rank]) < len(plan):
            raise _circle(plans, placement, ends, rank)
    return ends


def _nominal_cost(action: Action, split: frozenset[tuple[int, int]]) -> int:
    is_whole = action.kind is Kind.BACKWARD and (action.chunk, action.microbatch) not in split
    return _NOMINAL[action.kind] + (_NOMINAL[Kind.WEIGHT] if is_whole else 0)


def refusal(rank: int, action: Action | None, reason: str) -> ScheduleError:
    """The error of a plan that cannot run: which rank, which action, why."""
    where = f"rank {rank}" if action is None else f"rank {rank}, action {action}"
    return ScheduleError(f"{where}: {reason}")


def _at(action: Action, location: Location) -> Action:
    return Action(action.kind, location.chunk, action.microbatch)


def _check_order(rank: int, plan: Plan) -> None:
    done = set()
    forwards: Counter[int] = Counter()
    for action in plan:
        if action.kind is Kind.FORWARD:
            if action.microbatch != forwards[action.chunk]:
                due = Action(Kind.FORWARD, action.chunk, forwards[action.chunk])
                raise refusal(
                    rank,
                    action,
                    f"it comes before {due}: a chunk reads its data in the order of microbatches, "
                    "so number them in the order of their forwards",
                )
            forwards[action.chunk] += 1
        before = _BEFORE.get(action.kind)
        if before is not None:
            needed = Action(before, action.chunk, action.microbatch)
            if needed not in done:
                name = _NAMES[before]
                raise refusal(rank, action, f"it comes before its own {name} {needed}")
        done.add(action)


_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.WEIGHT: Kind.BACKWARD}
_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}


def _circle(
    plans: Sequence[Plan], placement: StagePlacement, ends: Sequence[list[int]], rank: int
) -> ScheduleError:
    action = plans[rank][len(ends[rank])]
    message = incoming(placement, rank, action)
    assert message is not None
    blocker = plans[message.source][len(ends[message.source])]
    reason = f"deadlock: it waits for {message.producer} of rank {message.source}"
    if blocker != message.producer:
        reason += f", which comes after {blocker} there, and that can never start"
    return refusal(rank, action, reason)
