"""Plans that split the backward: B gives the input gradient, W later the weight gradients.

Only B is on the path from stage to stage, so that ranks can fill with W the time in which they
would wait. Source: Qi et al. 2023 (arXiv:2401.10241).
"""

from __future__ import annotations

from collections import deque

from mcore.pipeline_parallel.actions import Action, Kind, Plan, backward, forward, weight
from mcore.pipeline_parallel.plans import check_rank, check_sizes, first_microbatches


def plan_zb_h1(pp: int, rank: int, num_microbatches: int) -> Plan:
    """1F1B with W put off as far as the memory of 1F1B's first rank allows: ZB-H1.

    Forwards and input gradients come in the order of 1F1B. Rank r holds p - r microbatches there,
    so it can hold back the weight gradients of r more: W of a microbatch follows B of the one r
    later. In the cool-down a W fills each gap between two B. At most p microbatches are in flight
    on every rank. With f = b = w the bubble is the time of p - 1 forwards where 1F1B's is 3 times
    that.

    Args:
        pp: number of pipeline ranks p.
        rank: this rank r.
        num_microbatches: m >= 1.

    Returns:
        The rank's plan; chunk is always 0, and every backward is split.

    Source: Qi et al. 2023 (arXiv:2401.10241) section 3.1.
    """
    check_sizes(pp=pp, num_microbatches=num_microbatches)
    check_rank(pp, rank)
    warmup = min(pp - rank - 1, num_microbatches)
    plan = [forward(0, microbatch) for microbatch in range(warmup)]
    weights = deque(weight(0, microbatch) for microbatch in range(num_microbatches))
    for microbatch in range(num_microbatches):
        is_steady = microbatch + warmup < num_microbatches
        if is_steady:
            plan.append(forward(0, microbatch + warmup))
        plan.append(backward(0, microbatch))
        if microbatch >= rank or not is_steady:
            plan.append(weights.popleft())
    return (*plan, *weights)


def plan_zb_v(pp: int, rank: int, num_microbatches: int) -> Plan:
    """Two chunks a rank, laid out as a V, with split backwards: ZB-V.

    Rank 0 has the first and the last stage, so that the gradient of a microbatch starts where its
    forward ends, and every rank's ramp-down is filled with W. With f = b = w no rank waits once it
    has started: p - 1 chunk forwards of idle time a rank, before its first action and after its
    last. At most 2 p chunk activations (p microbatches of the rank's layers, as in 1F1B) are in
    flight.

    Rank r of p: 2 (p - r) - 1 forwards of chunk 0; r times a forward of each chunk; p - r times F,
    B and W of chunk 1; then F, B, W of chunk 0 and F, B, W of chunk 1 in turn; r times B of both
    chunks, with W put off; p - r times B and W of chunk 0; the W that are left. Counts below
    2 p - 1 take the plan of 2 p - 1 without the actions of microbatches that do not exist.

    Args:
        pp: number of pipeline ranks p.
        rank: this rank r.
        num_microbatches: m >= 1.

    Returns:
        The rank's plan for `StagePlacement.v`; every backward is split.

    Source: Qi et al. 2023 (arXiv:2401.10241) section 6.
    """
    check_sizes(pp=pp, num_microbatches=num_microbatches)
    check_rank(pp, rank)
    writer = _Writer()
    writer.add("F0", 2 * (pp - rank) - 1)
    writer.add("F1 F0", rank)
    writer.add("F1 B1 W1", pp - rank)
    count = max(num_microbatches, 2 * pp - 1)
    while writer.done(Kind.FORWARD, 1) < count:
        is_filling = writer.done(Kind.FORWARD, 0) < count
        writer.add("F0 B0 W0 F1 B1 W1" if is_filling else "B0 W0 F1 B1 W1", 1)
    writer.add("B0 B1", rank)
    writer.add("B0 W0", pp - rank)
    writer.add("W1", count - writer.done(Kind.WEIGHT, 1))
    writer.add("W0", count - writer.done(Kind.WEIGHT, 0))
    return first_microbatches(writer.plan, num_microbatches)


class _Writer:
    """Writes actions; those of one kind and chunk take the microbatches in turn."""

    def __init__(self) -> None:
        self.plan: list[Action] = []
        self._done: dict[tuple[Kind, int], int] = {}

    def done(self, kind: Kind, chunk: int) -> int:
        """How many actions of the kind there are for the chunk."""
        return self._done.get((kind, chunk), 0)

    def add(self, words: str, times: int) -> None:
        """Repeat actions named by kind and chunk, such as `F1 B1`."""
        for word in words.split() * times:
            kind, chunk = Kind(word[0]), int(word[1])
            self.plan.append(Action(kind, chunk, self.done(kind, chunk)))
            self._done[kind, chunk] = self.done(kind, chunk) + 1
