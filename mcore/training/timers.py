"""Phases of a run and how long they took, by Megatron's names.

Nothing waits for the device: on CUDA a phase is two events on its stream, read at the log interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any, Literal

from mcore import device
from mcore.pipeline_parallel.actions import Action, Kind
from mcore.topology.collectives import all_gather_object
from mcore.topology.group import Group

TimingOption = Literal["max", "minmax", "all"]

#: What an action of the schedule counts as: (its wait for another rank, itself).
_ACTIONS = {
    Kind.FORWARD: ("forward-recv", "forward-compute"),
    Kind.BACKWARD: ("backward-recv", "backward-compute"),
    Kind.WEIGHT: ("weight-recv", "weight-compute"),
}
#: Phases in which a rank waits for nobody: there one rank alone can be slow.
OWN_PHASES = ("batch-generator", "optimizer-inner-step")
#: Phases in which tensor-parallel ranks wait for each other: there a group of them is slow.
GROUP_PHASES = ("forward-compute", "backward-compute", "weight-compute")


class Timers:
    """Sums the time of named phases until they are read.

    A phase above the level costs nothing. It is an observer of the pipeline executor as well, which
    at level 2 sees every action.

    Args:
        clock: marks of the device.
        level: phases up to this level are timed: 0, 1 or 2.
    """

    def __init__(self, clock: device.Clock, level: int) -> None:
        self.level = level
        self._clock = clock
        self._marks: dict[str, list[tuple[Any, Any]]] = {}
        self._seconds: dict[str, float] = {}
        self._nothing = nullcontext()

    def __call__(self, name: str, level: int = 1) -> AbstractContextManager[None]:
        """Context of a phase."""
        return self._timed(name) if level <= self.level else self._nothing

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._marks.setdefault(name, []).append((start, self._clock.mark()))

    def waiting(self, action: Action) -> AbstractContextManager[None]:
        """Around the wait for what an action needs from another rank."""
        return self(_ACTIONS[action.kind][0], 2)

    def running(self, action: Action) -> AbstractContextManager[None]:
        """Around an action itself."""
        return self(_ACTIONS[action.kind][1], 2)

    def add(self, name: str, seconds: float, level: int = 1) -> None:
        """Add a time that the host measured."""
        if level <= self.level:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        marks, self._marks = self._marks, {}
        seconds, self._seconds = self._seconds, {}
        between = self._clock.between
        for name, pairs in marks.items():
            seconds[name] = seconds.get(name, 0.0) + sum(between(*pair) for pair in pairs)
        return seconds


class RankTimes:
    """The phases of every rank.

    Args:
        ranks: seconds by phase, of each rank.
    """

    def __init__(self, ranks: Sequence[Mapping[str, float]]) -> None:
        self._ranks = ranks

    @classmethod
    def gather(cls, own: Mapping[str, float], host: Group) -> RankTimes:
        """Those of all ranks, from this rank's own.

        Comm: one gather of host-side numbers.
        """
        return cls(all_gather_object(dict(own), host))

    @property
    def names(self) -> list[str]:
        """Phases that any rank has, in the order in which they first ended."""
        return list(dict.fromkeys(name for rank in self._ranks for name in rank))

    def of(self, name: str) -> dict[int, float]:
        """Rank -> seconds, of the ranks that have the phase."""
        return {i: times[name] for i, times in enumerate(self._ranks) if name in times}

    def text(self, option: TimingOption, steps: int = 1) -> str:
        """Megatron's block of lines, in milliseconds a step; empty where nothing was timed."""
        heads = {"max": "max time", "minmax": "(min, max) time", "all": "times"}
        lines = []
        for name in self.names:
            times = {rank: 1000.0 * seconds / steps for rank, seconds in self.of(name).items()}
            low, high = min(times.values()), max(times.values())
            if option == "all":
                lines.append(f"  {name}:")
                lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in times.items()]
            elif option == "max":
                lines.append(f"    {(name + ' ').ljust(48, '.')}: {high:.2f}")
            else:
                lines.append(f"    {(name + ' ').ljust(48, '.')}: ({low:.2f}, {high:.2f})")
        return "\n".join([f"{heads[option]} across ranks (ms):", *lines]) if lines else ""

    def stragglers(self, groups: Sequence[Sequence[int]] = (), steps: int = 1) -> list[str]:
        """The slowest of each phase beside the median of all.

        Of phases that wait for nobody it is a rank. Of those that hold tensor-parallel collectives
        it is a group, whose ranks all take as long as the slowest of them.

        Args:
            groups: the ranks of each tensor-parallel group; none = every rank is its own.
            steps: over which times were summed.
        """
        alone = [(rank,) for rank in range(len(self._ranks))]
        lines = []
        for name in (*GROUP_PHASES, *OWN_PHASES):
            times = self.of(name)
            compared = {
                tuple(ranks): max(times[rank] for rank in ranks)
                for ranks in ((groups or alone) if name in GROUP_PHASES else alone)
                if all(rank in times for rank in ranks)
            }
            if len(compared) < 2:
                continue
            slowest = max(compared, key=lambda ranks: compared[ranks])
            usual = median(compared.values())
            ratio = compared[slowest] / usual if usual > 0 else 1.0
            who = f"rank {slowest[0]} takes"
            if len(slowest) > 1:
                who = f"tensor-parallel ranks {' '.join(map(str, slowest))} take"
            lines.append(
                f"{name}: {who} {1000 * compared[slowest] / steps:.2f} ms a step, "
                f"{ratio:.2f} times the median"
            )
        return lines
