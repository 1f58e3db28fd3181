"""Scales and shapes of pictures: values in pixels, round ticks, boxes as SVG paths, and stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

_LOG = 8  # ratio of largest to smallest value from which a scale is logarithmic
_LETTER = 7  # maximum width of a letter, in pixels
Row = tuple[str, Sequence[tuple[str, float, str]], str]  # name; (part, size, words) of each part; text behind the bar
LENGTH, STEP = 640, 30  # pixels: length of the longest bar, distance between bars


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values in [``low``, ``high``] to pixels in [``start``, ``end``], by their logarithms if ``is_log``."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def around(cls, values: Sequence[float], start: float, end: float) -> Scale:
        """Return a scale for all ``values``: from zero, or logarithmic if they differ by more than ``_LOG`` times."""
        low, high = min(values), max(values) or 1.0
        if low > 0 and high / low > _LOG:
            return cls(low / 1.3, high * 1.3, start, end, True)
        return cls(0.0, high * 1.12, start, end)

    def __call__(self, value: float) -> float:
        low, high, at = (log10(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

    def ticks(self, most: int = 5, *, whole: bool = False) -> list[float]:
        """Return round values on the scale; about ``most`` if it is linear. ``whole``: integers only."""
        if not self.is_log:
            return round_ticks(self.low, self.high, most, whole=whole)
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        return [tick for power in powers for by in (1, 2, 5) if self.holds(tick := by * 10.0**power)]


def round_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Return round numbers from ``low`` to ``high``: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / most
    power = 10.0 ** floor(log10(rough)) if rough > 0 else 1.0
    step = next(power * by for by in (1, 2, 5, 10) if power * by >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def box(left: float, top: float, width: float, height: float) -> str:
    """Return a rectangle as the attribute ``d`` of an SVG path."""
    return f"M{left:g} {top:g}h{width:g}v{height:g}h-{width:g}z"


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a bar. ``fill``: index of its colour in the palette; ``words``: its name and size."""

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
    """A picture of bars. ``legend``: (fill, name). ``limits``: (x, words) of lines across all bars. ``end``: x of the
    texts behind the bars."""

    title: str
    bars: tuple[Bar, ...]
    legend: tuple[tuple[int, str], ...]
    height: int
    limits: tuple[tuple[float, str], ...] = ()
    note: str = ""
    end: int = 0
    width: int = 0


def bars_of(
    title: str, rows: Sequence[Row], parts: Sequence[str], limits: Sequence[tuple[float, str]] = (), note: str = ""
) -> Bars:
    """Return the picture of ``rows``. ``parts``: in the order of their colours; ``limits``: in the unit of sizes."""
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
    height, width = top + len(rows) * STEP, end + 10 + _LETTER * longest
    return Bars(title, tuple(bars), legend, height, limits=lines, note=note, end=end, width=width)
