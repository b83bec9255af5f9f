"""Timelines of simulated pipelines as a picture: SVG as text, PNG with Pillow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from pathlib import Path
from typing import NamedTuple, TypeAlias

from PIL import Image, ImageDraw, ImageFont

from mcore.errors import ConfigError
from mcore.pipeline_parallel import Kind, Simulation

Color: TypeAlias = tuple[int, int, int]

# From light (first chunk) to dark (last chunk): blue, green and orange also differ in brightness,
# so that people who see few colours can tell them apart.
_SHADES: dict[Kind, tuple[Color, Color]] = {
    Kind.FORWARD: ((158, 202, 225), (8, 81, 156)),
    Kind.BACKWARD: ((161, 217, 155), (0, 88, 36)),
    Kind.WEIGHT: ((253, 190, 110), (166, 70, 5)),
}
_NAMES = {
    Kind.FORWARD: "F forward",
    Kind.BACKWARD: "B backward",
    Kind.WEIGHT: "W weight gradient",
}
_INK, _PAPER, _IDLE, _LINE = (33, 37, 41), (255, 255, 255), (233, 236, 239), (173, 181, 189)
_LEFT, _RIGHT, _ROW, _GAP, _HEAD, _FOOT = 66, 24, 30, 4, 34, 52
_FONT, _TITLE_FONT = 12, 15
_WIDEST = 1800
_TICKS, _TICK_DISTANCE = 12, 44


class Rectangle(NamedTuple):
    """A filled box, in pixels."""

    x: float
    y: float
    width: float
    height: float
    fill: Color


class Label(NamedTuple):
    """A line of text; x is its start, middle or end."""

    x: float
    y: float
    text: str
    color: Color
    size: int = _FONT
    anchor: str = "start"


Shape: TypeAlias = Rectangle | Label


@dataclass(frozen=True, slots=True)
class Timeline:
    """One pipeline to draw.

    Attributes:
        title: what it is, above it.
        simulation: who does what when.
    """

    title: str
    simulation: Simulation


def draw_timelines(timelines: Sequence[Timeline], path: str) -> None:
    """Draw timelines below each other, on one scale of time.

    Args:
        timelines: at least one.
        path: ends in .svg or .png.

    Raises:
        ConfigError: another ending, or a file that cannot be written.
    """
    target = Path(path)
    kind = target.suffix.lower()
    if kind not in (".svg", ".png"):
        raise ConfigError(f"--plot writes .svg and .png, got {path}")
    width, height, shapes = _lay_out(timelines)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == ".svg":
            target.write_text(_svg(width, height, shapes), encoding="utf-8")
        else:
            _png(width, height, shapes).save(target)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error


def _lay_out(timelines: Sequence[Timeline]) -> tuple[int, int, list[Shape]]:
    longest = max(timeline.simulation.step_time for timeline in timelines)
    shortest = min(
        span.end - span.start
        for timeline in timelines
        for spans in timeline.simulation.spans
        for span in spans
        if span.end > span.start
    )
    # Wide enough for two digits in the shortest action, where the picture can be that wide.
    scale = min(26 / shortest, (_WIDEST - _LEFT - _RIGHT) / longest)
    shapes: list[Shape] = []
    top = 12
    for timeline in timelines:
        shapes += _timeline(timeline, scale, top)
        top += _HEAD + len(timeline.simulation.spans) * (_ROW + _GAP) + _FOOT
    shapes += _legend(timelines, top - 12)
    width = max(_LEFT + scale * longest, *map(_right_edge, shapes)) + _RIGHT
    return ceil(width), top + 24, shapes


def _right_edge(shape: Shape) -> float:
    """Where a shape ends; a browser's letters may be a little wider than Pillow's."""
    if isinstance(shape, Rectangle):
        return shape.x + shape.width
    length = 1.1 * ImageFont.load_default(shape.size).getlength(shape.text)
    return shape.x + {"start": length, "middle": length / 2, "end": 0.0}[shape.anchor]


def _timeline(timeline: Timeline, scale: float, top: int) -> Iterator[Shape]:
    simulation = timeline.simulation
    yield Label(_LEFT, top + 18, timeline.title, _INK, _TITLE_FONT)
    chunks = 1 + max(s.action.chunk for spans in simulation.spans for s in spans)
    y = top + _HEAD
    for rank, spans in enumerate(simulation.spans):
        yield Label(_LEFT - 8, y + _ROW / 2 + 4, f"rank {rank}", _INK, anchor="end")
        yield Rectangle(_LEFT, y, scale * simulation.step_time, _ROW, _IDLE)
        for span in spans:
            width = scale * (span.end - span.start)
            fill = _shade(span.action.kind, span.action.chunk, chunks)
            x = _LEFT + scale * span.start
            yield Rectangle(x, y, max(width - 1, 0.5), _ROW, fill)
            text = str(span.action.microbatch)
            if width >= 8 * len(text) + 3:
                ink = _PAPER if sum(fill) < 380 else _INK
                yield Label(x + width / 2, y + _ROW / 2 + 4, text, ink, anchor="middle")
        y += _ROW + _GAP
    yield from _axis(simulation.step_time, scale, y)


def _axis(step_time: float, scale: float, y: float) -> Iterator[Shape]:
    yield Rectangle(_LEFT, y + 2, scale * step_time, 1, _LINE)
    step = _round_step(max(step_time / _TICKS, _TICK_DISTANCE / scale))
    for tick in range(int(step_time / step) + 1):
        x = _LEFT + scale * tick * step
        yield Rectangle(x, y + 2, 1, 5, _LINE)
        yield Label(x, y + 20, f"{tick * step:g}", _INK, anchor="middle")


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no less."""
    power = 10.0 ** len(str(int(least))) / 10 if least >= 1 else 1e-9
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _legend(timelines: Sequence[Timeline], y: float) -> Iterator[Shape]:
    actions = [s.action for t in timelines for spans in t.simulation.spans for s in spans]
    chunks = 1 + max(action.chunk for action in actions)
    used = {action.kind for action in actions}
    x = float(_LEFT)
    for kind in Kind:
        if kind not in used:
            continue
        for chunk in range(chunks):
            yield Rectangle(x, y, 16, 14, _shade(kind, chunk, chunks))
            x += 18
        name = _NAMES[kind]
        yield Label(x + 4, y + 12, name, _INK)
        x += 8 * len(name) + 16
    yield Rectangle(x, y, 16, 14, _IDLE)
    note = "idle; numbers are microbatches" + ("; darker = later chunk" if chunks > 1 else "")
    yield Label(x + 22, y + 12, note, _INK)


def _shade(kind: Kind, chunk: int, chunks: int) -> Color:
    light, dark = _SHADES[kind]
    part = chunk / (chunks - 1) if chunks > 1 else 0.35
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _svg(width: int, height: int, shapes: Sequence[Shape]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="{_hex(_PAPER)}"/>',
    ]
    for shape in shapes:
        if isinstance(shape, Rectangle):
            lines.append(
                f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" '
                f'height="{shape.height:.2f}" fill="{_hex(shape.fill)}"/>'
            )
        else:
            lines.append(
                f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size}" '
                f'text-anchor="{shape.anchor}" fill="{_hex(shape.color)}">'
                f"{escape(shape.text)}</text>"
            )
    return "\n".join([*lines, "</svg>\n"])


def _png(width: int, height: int, shapes: Sequence[Shape]) -> Image.Image:
    zoom = 2  # pixels a unit, so that small digits stay sharp
    image = Image.new("RGB", (width * zoom, height * zoom), _PAPER)
    canvas = ImageDraw.Draw(image)
    fonts = {size: ImageFont.load_default(size * zoom) for size in (_FONT, _TITLE_FONT)}
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    for shape in shapes:
        if isinstance(shape, Rectangle):
            right, bottom = shape.x + shape.width, shape.y + shape.height
            corners = [(shape.x * zoom, shape.y * zoom), (right * zoom - 1, bottom * zoom - 1)]
            canvas.rectangle([tuple(map(round, corner)) for corner in corners], fill=shape.fill)
        else:
            canvas.text(
                (shape.x * zoom, shape.y * zoom),
                shape.text,
                fill=shape.color,
                font=fonts[shape.size],
                anchor=anchors[shape.anchor],
            )
    return image


def _hex(color: Color) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color)
