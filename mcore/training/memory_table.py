"""Tables of memory, in MiB: the predicted bytes of every rank, and measured ones beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mcore.training.held_memory import HeldMemory
from mcore.training.memory import RankMemory

_HELD = ("parameters", "gradients", "main_parameters", "moments", "between_steps")


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What a rank was found to take.

    Attributes:
        pipeline_rank: which; its tensor-parallel ranks are told as one.
        held: between steps.
        peak: the most inside a step.
    """

    pipeline_rank: int
    held: HeldMemory
    peak: int

    def bytes_of(self, name: str) -> int:
        """A column of the table."""
        return self.peak if name == "peak" else int(getattr(self.held, name))


def memory_table(ranks: Sequence[RankMemory]) -> list[str]:
    """The prediction as lines of text."""
    columns = [*_HELD, "activations", "workspace", "peak"]
    if any(rank.in_host_memory for rank in ranks):
        columns.append("in_host_memory")
    numbers = range(len(ranks))
    return _table(columns, numbers, lambda rank, name: _mib(getattr(ranks[rank], name)))


def measured_table(
    measured: Sequence[MeasuredMemory], predicted: Sequence[RankMemory]
) -> list[str]:
    """The largest figure of each pipeline rank, with the predicted one after a slash.

    Args:
        measured: of every rank of the model.
        predicted: of every pipeline rank; none where nothing was predicted.
    """
    columns = [*_HELD, "peak"]
    if any(rank.held.in_host_memory for rank in measured):
        columns.append("in_host_memory")

    def cell(rank: int, name: str) -> str:
        most = max(found.bytes_of(name) for found in measured if found.pipeline_rank == rank)
        if not predicted:
            return _mib(most)
        return f"{_mib(most)} / {_mib(getattr(predicted[rank], name))}"

    return _table(columns, sorted({found.pipeline_rank for found in measured}), cell)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _table(
    columns: Sequence[str], ranks: Sequence[int], cell: Callable[[int, str], str]
) -> list[str]:
    """Rows of ranks under a header, every column as wide as its widest cell."""
    rows = [["pipeline rank", *(name.replace("_", " ") for name in columns)]]
    rows += [[str(rank), *(cell(rank, name) for name in columns)] for rank in ranks]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " | ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in rows
    ]
