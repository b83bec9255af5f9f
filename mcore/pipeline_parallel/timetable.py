"""A simulated pipeline as a table for people: one row a rank, one column a unit of time."""

from __future__ import annotations

import math

from mcore.pipeline_parallel.simulate import Simulation, Span

# Times are sums, so that a multiple of the unit may be off by a few last bits.
_FUZZ = 1e-9
_MOST_COLUMNS = 500


def format_timetable(simulation: Simulation) -> str:
    """Draw who does what when.

    A column is as long as the shortest action that takes time, but the step has 500 columns at
    most. An action stands in the column in which it starts, dashes fill the rest of its time, dots
    are idle time. Every action is there: where two of a rank would start in the same column, the
    first pushes on what follows it.

    Returns:
        One line a rank, such as `rank 0  F0.0 F0.1 .... B0.0 ----`.
    """
    spans = [span for rank in simulation.spans for span in rank]
    unit = min(span.end - span.start for span in spans if span.end > span.start)
    unit = max(unit, simulation.step_time / _MOST_COLUMNS)
    width = max(len(str(span.action)) for span in spans)
    rows = [_row(row, unit, width) for row in simulation.spans]
    columns = max(math.ceil(simulation.step_time / unit - _FUZZ), *map(len, rows))
    label = len(f"rank {len(rows) - 1}")
    lines = []
    for rank, cells in enumerate(rows):
        idle = ["." * width] * (columns - len(cells))
        lines.append(f"{f'rank {rank}':<{label}}  {' '.join([*cells, *idle]).rstrip()}")
    return "\n".join(lines)


def _row(spans: tuple[Span, ...], unit: float, width: int) -> list[str]:
    """The cells up to the end of the last action."""
    cells: list[str] = []
    free = 0  # the column after that of the last action
    for span in spans:
        start = max(free, math.floor(span.start / unit + _FUZZ))
        del cells[start:]
        cells += ["." * width] * (start - len(cells))
        cells.append(str(span.action).ljust(width))
        free = start + 1
        cells += ["-" * width] * (math.ceil(span.end / unit - _FUZZ) - len(cells))
    return cells
