"""A simulated pipeline as a table for people: one row a rank, one column a unit of time."""

from __future__ import annotations

import math

from mcore.pipeline_parallel.simulate import Simulation, Span


def format_timetable(simulation: Simulation) -> str:
    """Draw who does what when.

    A column is as long as the shortest action. An action stands at its start, dashes fill the rest
    of its time, dots are idle time.

    Returns:
        One line a rank, such as `rank 0  F0.0 F0.1 .... B0.0 ----`.
    """
    spans = [span for rank in simulation.spans for span in rank]
    unit = min(span.end - span.start for span in spans)
    width = max(len(str(span.action)) for span in spans)
    columns = math.ceil(simulation.step_time / unit - 1e-9)
    label = len(f"rank {len(simulation.spans) - 1}")
    return "\n".join(
        f"{f'rank {rank}':<{label}}  {_row(row, unit, columns, width)}"
        for rank, row in enumerate(simulation.spans)
    )


def _row(spans: tuple[Span, ...], unit: float, columns: int, width: int) -> str:
    cells = ["." * width] * columns
    for span in spans:
        start = round(span.start / unit)
        for column in range(start, min(columns, max(start + 1, round(span.end / unit)))):
            cells[column] = "-" * width
        cells[min(start, columns - 1)] = str(span.action).ljust(width)
    return " ".join(cells).rstrip()
