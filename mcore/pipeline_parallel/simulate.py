"""Prove a pipeline before it runs: all ranks' programs against rendezvous point-to-point.

The simulator knows nothing of how programs are made. It models the strictest backend that we run
on: a rank's batches run one after another in the order posted, the members of a batch at the same
time; a send ends only with its receive; sends and receives between two ranks match by order. An
action waits for the batch that brings its input and for those before it; a batch is not posted
while `SENDS_UNDER_WAY` others wait, of which the oldest only sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore.errors import ScheduleError
from mcore.pipeline_parallel.actions import Action, Kind, Plan, split_backwards
from mcore.pipeline_parallel.communication import (
    SENDS_UNDER_WAY,
    Batch,
    Program,
    plan_communication,
)
from mcore.pipeline_parallel.costs import Costs
from mcore.pipeline_parallel.messages import Message, check_plans, incoming, refusal
from mcore.topology.placement import StagePlacement


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a set of plans costs.

    Attributes:
        spans: for each rank, its actions in time.
        step_time: when the last rank is done, communication included.
        ideal_time: the longest time that a rank computes.
        peak_in_flight: for each rank, the most microbatch activations (of one chunk each) that are
            held between their forward and the end of their backward, weight gradients included.
        peak_receives: for each rank, the most receive buffers posted and not yet used.
    """

    spans: tuple[tuple[Span, ...], ...]
    step_time: float
    ideal_time: float
    peak_in_flight: tuple[int, ...]
    peak_receives: tuple[int, ...]

    @property
    def busy_time(self) -> float:
        """Time spent in actions, summed over ranks."""
        return sum(span.end - span.start for spans in self.spans for span in spans)

    @property
    def bubble(self) -> float:
        """Idle time over total rank-time, 0 .. 1."""
        return 1.0 - self.busy_time / (self.step_time * len(self.spans))

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over computing time; (p - 1) / (m v) for (interleaved) 1F1B on equal stages."""
        return self.step_time * len(self.spans) / self.busy_time - 1.0


def simulate(
    plans: Sequence[Plan],
    placement: StagePlacement,
    costs: Costs | None = None,
    programs: Sequence[Program] | None = None,
    own_costs: Mapping[tuple[int, int], Costs] | None = None,
) -> Simulation:
    """Run all ranks' plans in simulated time.

    Args:
        plans: the plan of each pipeline rank.
        placement: where the stages live.
        costs: how long actions and messages take; the default is forward 1, backward 2, messages 0.
        programs: the plans with their communication; None = `plan_communication(plans, placement)`.
        own_costs: of the actions of some (rank, chunk), in place of `costs`.

    Returns:
        Times and peaks.

    Raises:
        ScheduleError: an action is missing or doubled, ranks wait for each other for ever, or a
            receive meets another message than the one it is for; with the rank, the action and the
            reason.
    """
    check_plans(plans, placement)
    if programs is None:
        programs = plan_communication(plans, placement)
    for rank, (plan, program) in enumerate(zip(plans, programs, strict=True)):
        if tuple(step for step in program if isinstance(step, Action)) != plan:
            raise refusal(rank, None, "the program does not run the actions of the plan in order")
    machine = _Machine(placement, costs or Costs(), own_costs or {}, programs)
    machine.run()
    spans = tuple(tuple(rank.spans) for rank in machine.ranks)
    return Simulation(
        spans=spans,
        step_time=max(rank.finish() for rank in machine.ranks),
        ideal_time=max(sum(span.end - span.start for span in rank) for rank in spans),
        peak_in_flight=tuple(map(peak_in_flight, plans)),
        peak_receives=tuple(rank.peak_receives for rank in machine.ranks),
    )


def peak_in_flight(plan: Plan) -> int:
    """The most activations that a plan holds at once; in an evaluation none outlives its F."""
    if all(action.kind is Kind.FORWARD for action in plan):
        return 1
    split = split_backwards(plan)
    held = peak = 0
    for action in plan:
        held += 1 if action.kind is Kind.FORWARD else 0
        peak = max(peak, held)
        last = Kind.WEIGHT if (action.chunk, action.microbatch) in split else Kind.BACKWARD
        held -= 1 if action.kind is last else 0
    return peak


@dataclass(slots=True)
class _Posted:
    """A batch on its way."""

    batch: Batch
    posted: float
    start: float | None = None
    done: float | None = None
    arrivals: dict[Message, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Rank:
    """One rank: a lane that computes and a lane that communicates."""

    program: Program
    position: int = 0
    clock: float = 0.0
    posted: list[_Posted] = field(default_factory=list)
    running: int = 0  # the first batch that is not done
    waited: int = 0  # the first batch that the computing lane has not waited for
    carrier: dict[Message, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    computed: set[Action] = field(default_factory=set)
    unused: int = 0
    peak_receives: int = 0

    def finish(self) -> float:
        """When both lanes are done."""
        last = self.posted[-1].done if self.posted else 0.0
        assert last is not None
        return max(self.clock, last)


class _Machine:
    """Advances all ranks until nothing moves."""

    def __init__(
        self,
        placement: StagePlacement,
        costs: Costs,
        own_costs: Mapping[tuple[int, int], Costs],
        programs: Sequence[Program],
    ) -> None:
        self.costs, self.own_costs = costs, own_costs
        self.ranks = [_Rank(program) for program in programs]
        self.splits = [
            split_backwards(step for step in program if isinstance(step, Action))
            for program in programs
        ]
        self.inputs = [
            {step: incoming(placement, rank, step) for step in program if isinstance(step, Action)}
            for rank, program in enumerate(programs)
        ]
        # The two ends of each directed pair of ranks, in the order in which they were started.
        self.sent: dict[tuple[int, int], list[tuple[Message, _Posted]]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[tuple[Message, _Posted]]] = defaultdict(list)

    def run(self) -> None:
        progress = True
        while progress:
            progress = False
            for rank in range(len(self.ranks)):
                progress |= self._compute(rank)
                progress |= self._communicate(rank)
        for rank, state in enumerate(self.ranks):
            if state.position < len(state.program) or state.running < len(state.posted):
                raise self._deadlock(rank)

    def _compute(self, rank: int) -> bool:
        """Run the computing lane of a rank as far as it goes; whether it moved."""
        state = self.ranks[rank]
        before = state.position
        while state.position < len(state.program):
            step = state.program[state.position]
            moved = self._post(rank, step) if isinstance(step, Batch) else self._act(rank, step)
            if not moved:
                break
            state.position += 1
        return state.position > before

    def _post(self, rank: int, batch: Batch) -> bool:
        state = self.ranks[rank]
        while len(state.posted) - state.waited >= SENDS_UNDER_WAY:
            oldest = state.posted[state.waited]
            if oldest.batch.receives:
                break
            if oldest.done is None:
                return False
            state.clock = max(state.clock, oldest.done)
            state.waited += 1
        for message in batch.sends:
            if message.producer not in state.computed:
                raise refusal(rank, message.producer, f"{message} is sent before it is computed")
        state.carrier.update({message: len(state.posted) for message in batch.receives})
        state.posted.append(_Posted(batch, state.clock))
        state.unused += len(batch.receives)
        state.peak_receives = max(state.peak_receives, state.unused)
        return True

    def _act(self, rank: int, action: Action) -> bool:
        state = self.ranks[rank]
        message = self.inputs[rank][action]
        start = state.clock
        if message is not None and message.is_local:
            if message.producer not in state.computed:
                raise refusal(rank, action, f"it comes before {message.producer}, its input")
        elif message is not None:
            carrier = state.carrier.get(message)
            if carrier is None:
                raise refusal(rank, action, f"the receive of {message} has not been posted")
            done = state.posted[carrier].done
            if done is None:
                return False
            start = max(start, done)
            state.waited = max(state.waited, carrier + 1)
            state.unused -= 1
        costs = self.own_costs.get((rank, action.chunk), self.costs)
        state.clock = start + costs.of(action, self.splits[rank])
        state.spans.append(Span(action, start, state.clock))
        state.computed.add(action)
        return True

    def _communicate(self, rank: int) -> bool:
        """Start the rank's next batch and finish what has met its other end; whether it moved."""
        state = self.ranks[rank]
        moved = False
        while state.running < len(state.posted):
            current = state.posted[state.running]
            if current.start is None:
                previous = state.posted[state.running - 1].done if state.running else 0.0
                assert previous is not None
                current.start = max(current.posted, previous)
                self._open(rank, current)
                moved = True
            messages = (*current.batch.sends, *current.batch.receives)
            if any(message not in current.arrivals for message in messages):
                break
            current.done = max(current.arrivals.values(), default=current.start)
            state.running += 1
            moved = True
        return moved

    def _open(self, rank: int, current: _Posted) -> None:
        """Bring the batch's ends to their channels, and let ends meet in order."""
        for message in current.batch.sends:
            self.sent[rank, message.destination].append((message, current))
            self._meet(rank, message.destination, len(self.sent[rank, message.destination]) - 1)
        for message in current.batch.receives:
            self.received[message.source, rank].append((message, current))
            self._meet(message.source, rank, len(self.received[message.source, rank]) - 1)

    def _meet(self, source: int, destination: int, index: int) -> None:
        sent, received = self.sent[source, destination], self.received[source, destination]
        if index >= min(len(sent), len(received)):
            return
        (message, at_source), (expected, at_destination) = sent[index], received[index]
        if message != expected:
            raise refusal(
                destination,
                expected.consumer,
                f"it would get {message} from rank {source} in place of {expected}: sends and "
                f"receives of a pair of ranks must be posted in the same order",
            )
        assert at_source.start is not None
        assert at_destination.start is not None
        arrival = max(at_source.start, at_destination.start) + self.costs.communication
        at_source.arrivals[message] = at_destination.arrivals[message] = arrival

    def _deadlock(self, rank: int) -> ScheduleError:
        state = self.ranks[rank]
        action = None
        if state.position < len(state.program):
            step = state.program[state.position]
            action = step if isinstance(step, Action) else None
        current = state.posted[state.running]
        waiting = [
            str(message)
            for message in (*current.batch.sends, *current.batch.receives)
            if message not in current.arrivals
        ]
        return refusal(
            rank,
            action,
            f"deadlock: its communication is stuck at {', '.join(waiting)}, whose other end is "
            f"never posted or stands behind other communication that is stuck",
        )
