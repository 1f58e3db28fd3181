"""Bars made of parts, side by side and to one scale: bytes of ranks, seconds of a step, bytes of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LENGTH, STEP = 640, 30  # pixels: of the longest bar, from bar to bar
_LETTER = 7  # pixels, at most


@dataclass(frozen=True, slots=True)
class Segment:
    """``fill``: index of a colour of the palette; ``words``: its name and size."""

    x: float
    width: float
    fill: int
    words: str


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    y: int
    segments: tuple[Segment, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Bars:
    """``legend``: (fill, name). ``limits``: (x, words) of lines across all bars; ``end``: the begin of their texts."""

    title: str
    bars: tuple[Bar, ...]
    legend: tuple[tuple[int, str], ...]
    height: int
    limits: tuple[tuple[float, str], ...] = ()
    note: str = ""
    end: int = 0
    width: int = 0


Row = tuple[str, Sequence[tuple[str, float, str]], str]  # name; (part, size, words) of each; text behind the bar


def bars_of(
    title: str, rows: Sequence[Row], parts: Sequence[str], limits: Sequence[tuple[float, str]] = (), note: str = ""
) -> Bars:
    """``parts`` in the order of their colours; ``limits`` in the unit of the sizes."""
    most = max([sum(size for _, size, _ in row[1]) for row in rows] + [size for size, _ in limits] + [1e-30])
    scale, left = LENGTH / most, 16 + _LETTER * max([len(name) for name, *_ in rows], default=0)
    bars, top = [], 8 + 16 * len(limits)
    for i, (name, sizes, text) in enumerate(rows):
        x, segments = float(left), []
        for part, size, words in sizes:
            if size > 0:
                segments.append(Segment(round(x, 1), round(max(size * scale, 0.5), 1), parts.index(part), words))
                x += size * scale
        bars.append(Bar(name, top + i * STEP, tuple(segments), text))
    used = {part for _, sizes, _ in rows for part, size, _ in sizes if size > 0}
    legend = tuple((i, part) for i, part in enumerate(parts) if part in used)
    lines = tuple((round(left + size * scale, 1), words) for size, words in limits)
    end, longest = left + LENGTH + 10, max([len(text) for *_, text in rows], default=0)
    return Bars(title, tuple(bars), legend, top + len(rows) * STEP, lines, note, end, end + 10 + _LETTER * longest)
