"""Pure plans: in which order a pipeline rank runs its forwards and backwards.

Those that split the backward are in `zero_bubble.py`. A plan depends on integers only.
`simulate.py` proves a set of plans, `executor.py` runs one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from mcore.errors import ConfigError
from mcore.pipeline_parallel.actions import Action, Kind, Plan, backward, forward


def plan_no_pipelining(num_microbatches: int, num_chunks: int = 1) -> Plan:
    """One rank holds the whole model: each microbatch runs forward and backward before the next.

    Args:
        num_microbatches: m >= 1.
        num_chunks: into how many chunks the model of the rank is cut.

    Returns:
        For each microbatch: F of all chunks in order, then B of all chunks in reverse order.
    """
    check_sizes(num_microbatches=num_microbatches, num_chunks=num_chunks)
    plan: list[Action] = []
    for microbatch in range(num_microbatches):
        plan += [forward(chunk, microbatch) for chunk in range(num_chunks)]
        plan += [backward(chunk, microbatch) for chunk in reversed(range(num_chunks))]
    return tuple(plan)


def plan_gpipe(pp: int, rank: int, num_microbatches: int) -> Plan:
    """All forwards, then all backwards: simple, and all m microbatches are in flight at once.

    Bubble over ideal time: (p - 1) / m, that of 1F1B.

    Args:
        pp: number of pipeline ranks p.
        rank: this rank r; the plan is the same on all.
        num_microbatches: m >= 1.

    Returns:
        The rank's plan; chunk is always 0.

    Source: Huang et al. 2019 (arXiv:1811.06965) section 2.3.
    """
    check_sizes(pp=pp, num_microbatches=num_microbatches)
    check_rank(pp, rank)
    forwards = [forward(0, microbatch) for microbatch in range(num_microbatches)]
    return (*forwards, *(backward(0, microbatch) for microbatch in range(num_microbatches)))


def plan_bounded(pp: int, rank: int, num_microbatches: int, max_in_flight: int) -> Plan:
    """1F1B that holds at most N microbatches on any rank, for less memory and a larger bubble.

    With N >= p this is 1F1B. With fewer, a microbatch starts only when one of N has come all the
    way back; ranks do whatever can be done, a backward first, in the order in which that happens if
    a forward costs 1 and a backward 2.

    Args:
        pp: number of pipeline ranks p.
        rank: this rank r.
        num_microbatches: m >= 1.
        max_in_flight: N >= 1.

    Returns:
        The rank's plan; chunk is always 0.
    """
    check_sizes(pp=pp, num_microbatches=num_microbatches, max_in_flight=max_in_flight)
    check_rank(pp, rank)
    return _bounded_plans(pp, num_microbatches, max_in_flight)[rank]


@lru_cache(maxsize=16)
def _bounded_plans(pp: int, num_microbatches: int, max_in_flight: int) -> tuple[Plan, ...]:
    """Let all ranks run, and write down what they did."""
    plans: list[list[Action]] = [[] for _ in range(pp)]
    clocks = [0] * pp
    forward_ends: list[list[int]] = [[] for _ in range(pp)]
    backward_ends: list[list[int]] = [[] for _ in range(pp)]

    def candidates() -> Iterator[tuple[int, int, int]]:
        """(start, 0 for a backward and 1 for a forward, rank) of all that could be done next."""
        for r in range(pp):
            begun, ended = len(forward_ends[r]), len(backward_ends[r])
            gradients = forward_ends[r] if r == pp - 1 else backward_ends[r + 1]
            if ended < len(gradients):
                yield max(clocks[r], gradients[ended]), 0, r
            has_room = begun - ended < min(pp - r, max_in_flight) and begun < num_microbatches
            if has_room and (r == 0 or begun < len(forward_ends[r - 1])):
                arrival = 0 if r == 0 else forward_ends[r - 1][begun]
                yield max(clocks[r], arrival), 1, r

    while len(backward_ends[0]) < num_microbatches:
        start, is_forward, r = min(candidates())
        ends, action = (forward_ends[r], forward) if is_forward else (backward_ends[r], backward)
        plans[r].append(action(0, len(ends)))
        clocks[r] = start + (1 if is_forward else 2)
        ends.append(clocks[r])
    return tuple(map(tuple, plans))


def plan_1f1b(pp: int, rank: int, num_microbatches: int) -> Plan:
    """One forward, one backward: at most p - r microbatches are in flight on rank r of p.

    Warm-up: min(p - r - 1, m) forwards, just enough for the first gradient to arrive in time.
    Bubble over ideal time: (p - 1) / m.

    Args:
        pp: number of pipeline ranks p.
        rank: this rank r.
        num_microbatches: m >= 1.

    Returns:
        The rank's plan; chunk is always 0.

    Source: Narayanan et al. 2021 (arXiv:2104.04473) section 2.2.1, PipeDream-Flush.
    """
    check_sizes(pp=pp, num_microbatches=num_microbatches)
    check_rank(pp, rank)
    forwards = [forward(0, microbatch) for microbatch in range(num_microbatches)]
    backwards = [backward(0, microbatch) for microbatch in range(num_microbatches)]
    return _one_forward_one_backward(forwards, backwards, warmup=pp - rank - 1)


def plan_interleaved(
    pp: int, rank: int, num_microbatches: int, num_chunks: int, group: int | None = None
) -> Plan:
    """1F1B over v model chunks a rank, which divides the bubble by v.

    Warm-up: min(2 (p - r - 1) + (v - 1) g, m v) forwards: the first microbatch must come round all
    v chunks (g microbatches each time), and a forward and a gradient pass each rank between r and
    the last one. Bubble over ideal time: (p - 1) / (m v) when g divides m.

    The last group holds the m mod g microbatches that are left. Where those are fewer than p, a
    forward would wait for a rank that is behind in its backwards (a deadlock for many sizes, idle
    time for the others; Megatron refuses these counts): the plan is then that of a last group of p,
    without the actions of the microbatches that do not exist. With one chunk this is `plan_1f1b`.

    Args:
        pp: number of pipeline ranks p.
        rank: this rank r.
        num_microbatches: m >= 1.
        num_chunks: model chunks a rank v >= 1 (virtual pipeline size).
        group: how many microbatches run through a chunk before the next chunk's turn, g
            (Megatron's microbatch_group_size_per_vp_stage); None = p.

    Returns:
        The rank's plan; the backward goes through the chunks in reverse.

    Raises:
        ConfigError: a size that is no positive number, or group < p, which could leave a rank
            waiting for what another has not reached.

    Source: Narayanan et al. 2021 (arXiv:2104.04473) section 2.2.2; order as Megatron-LM's tables.
    """
    group = pp if group is None else group
    check_sizes(pp=pp, num_microbatches=num_microbatches, num_chunks=num_chunks, group=group)
    check_rank(pp, rank)
    if num_chunks == 1:
        return plan_1f1b(pp, rank, num_microbatches)
    if group < pp:
        raise ConfigError(
            f"the microbatch group size ({group}) must be at least the pipeline size ({pp}): use "
            f"--microbatch-group-size-per-virtual-pipeline-stage {pp} or more"
        )
    rest = num_microbatches % group
    padded = num_microbatches - rest + pp if 0 < rest < pp else num_microbatches
    order = interleaved_order(padded, num_chunks, group)
    forwards = [forward(chunk, microbatch) for microbatch, chunk in order]
    backwards = [backward(num_chunks - 1 - chunk, microbatch) for microbatch, chunk in order]
    warmup = 2 * (pp - rank - 1) + (num_chunks - 1) * group
    plan = _one_forward_one_backward(forwards, backwards, warmup)
    return first_microbatches(plan, num_microbatches)


def first_microbatches(plan: Sequence[Action], num_microbatches: int) -> Plan:
    """A plan for more microbatches, without the actions of those that do not exist.

    A microbatch waits only for its own actions on other ranks, so that what is left still runs.
    """
    return tuple(action for action in plan if action.microbatch < num_microbatches)


def interleaved_order(
    num_microbatches: int, num_chunks: int, group: int
) -> tuple[tuple[int, int], ...]:
    """(microbatch, chunk) in the order of an interleaved schedule's forwards.

    For each group of microbatches, for each chunk, each microbatch of the group; the last group
    holds what is left.
    """
    return tuple(
        (microbatch, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(start, min(start + group, num_microbatches))
    )


def forward_part(plan: Plan) -> Plan:
    """The plan of an evaluation: the same forwards in the same order, no backward."""
    return tuple(action for action in plan if action.kind is Kind.FORWARD)


def _one_forward_one_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> Plan:
    """`warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    plan = list(forwards[:warmup])
    for index, action in enumerate(forwards[warmup:]):
        plan += [action, backwards[index]]
    plan += backwards[len(forwards) - warmup :]
    return tuple(plan)


def check_sizes(**sizes: int) -> None:
    """Raise `ConfigError` for a size below 1, by name."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")


def check_rank(pp: int, rank: int) -> None:
    """Raise `ConfigError` for a rank that a pipeline of pp ranks does not have."""
    if not 0 <= rank < pp:
        raise ConfigError(f"rank must be one of 0 .. {pp - 1} (pipeline size {pp}), got {rank}")
