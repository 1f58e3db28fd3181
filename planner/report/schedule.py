"""A schedule for other programs and for the eye: JSON, a table of actions, and a chart.

In JSON, ``order`` writes +(chunk + 1) for a forward and -(chunk + 1) for a backward; ``steps`` has the W too. In the
chart, one SVG file that needs nothing else, time goes to the right, with a row for each pp rank:

    forward    a light, plain bar with dark digits
    backward   a dark, hatched bar with white digits
    weights    a bar of middle tone with white digits: the gradients of weights, where they wait
    digits     the microbatch; below them, where ranks have several chunks, c and the chunk, each in its own tone
    bubble     the bare row between bars

A long timeline continues on the next line, like text; a bar that crosses the end of a line appears in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from planner.pipeline.actions import without_weights
from planner.pipeline.message_slots import slots_by_kind
from planner.pipeline.schedule import Action, Schedule
from planner.pipeline.simulate import Simulation
from planner.regions.static_memory import slots_of
from planner.report.shapes import box

_BAR = {"F": ("#cfe4f7", "#9fcaef", "#74aee2", "#b9d9b0"), "B": ("#9a3412", "#6d2a7f", "#7c4a03", "#1f4e79"),
        "W": ("#2e7d5b", "#4d7c0f", "#0f766e", "#155e75")}  # fmt: skip
_STYLE = """
.schedule text { font: 11px system-ui, sans-serif; fill: #1f2328 }
.schedule .page { fill: #ffffff } .schedule .row { fill: #e3e6ea } .schedule .tick { stroke: #b4bac2 }
.schedule .heading { font-size: 15px; font-weight: 600 }
.schedule .small { font-size: 10px } .schedule .middle { text-anchor: middle }
.schedule .F text { fill: #0b1f33 }
.schedule .W text, .schedule .B text {
  fill: #ffffff; stroke: #000000; stroke-width: 2; stroke-opacity: 0.45; paint-order: stroke
}
.schedule .action text { text-anchor: middle } .schedule .action .chunk { font-size: 9px }
.schedule .F .bar { stroke: #2f6fb0 } .schedule .W .bar, .schedule .B .bar { stroke: #ffffff }
.schedule .hatch { stroke: #ffffff; stroke-width: 1.5; stroke-opacity: 0.3 }
@media (prefers-color-scheme: dark) {
  .schedule text { fill: #e6edf3 } .schedule .F text { fill: #0b1f33 }
  .schedule .W text, .schedule .B text { fill: #ffffff }
  .schedule .page { fill: #0d1117 } .schedule .row { fill: #2b323b } .schedule .tick { stroke: #59636e }
  .schedule .F .bar { stroke: #0d1117 } .schedule .W .bar, .schedule .B .bar { stroke: #c9d1d9 }
}"""
_LEFT, _HEAD, _MARGIN, _WIDEST = 64, 74, 16, 1500  # pixels: rank names, title and legend, the edge, a line of bars
_AXIS, _GAP = 18, 14  # pixels above and below the rows of a line


def schedule_to_dict(schedule: Schedule, simulation: Simulation) -> dict[str, Any]:
    """Plain data: the schedule table, each rank's actions in order, and the share of time that is bubble."""
    return {
        "schedule_table": [list(row) for row in schedule.table],
        "ranks": [_rank_to_dict(schedule, rank) for rank in range(schedule.pp)],
        "bubble_fraction": simulation.bubble_fraction,
    }


def _rank_to_dict(schedule: Schedule, rank: int) -> dict[str, Any]:
    order = schedule.orders[rank]
    return {
        "pp_rank": rank,
        "num_warmup": schedule.num_warmup(rank),
        "order": [a.chunk + 1 if a.kind == "F" else -a.chunk - 1 for a in without_weights(order)],
        "steps": [list(action) for action in order],
        "static_input_slots": len(set(slots_by_kind(order, {action.chunk: [None] for action in order}).values())),
        "graph_slots": len(set(slots_of(order).values())),
    }


def costs_in_words(schedule: Schedule) -> str:
    """The costs that the simulation assumes if no others are known."""
    return "F, B and W cost the same" if schedule.has_weights else "a backward costs two forwards"


def schedule_text(schedule: Schedule, simulation: Simulation) -> str:
    """The step by rank grid, then its costs."""
    ranks = [_rank_to_dict(schedule, rank) for rank in range(schedule.pp)]
    counts = [[rank[key] for rank in ranks] for key in ("num_warmup", "static_input_slots", "graph_slots")]
    found = (" ".join(map(str, of)) for of in (*counts, simulation.peak_in_flight, simulation.peak_waiting))
    warmups, slots, graphs, peaks, waiting = found
    weights = ", W its weight gradients" if schedule.has_weights else ""
    return "\n".join(
        [
            f"{schedule.kind}: pp {schedule.pp}, vpp {schedule.vpp}, {schedule.num_microbatches} microbatches",
            f"F3.1: forward of microbatch 3 on chunk 1, B its backward{weights}; a dot: the rank waits",
            "",
            simulation.grid(),
            "",
            f"bubble               {simulation.bubble_fraction:.1%} of the time ({costs_in_words(schedule)})",
            f"warm-up forwards     {warmups}   (by pp rank)",
            f"peak in flight       {peaks}   (by pp rank)",
            *([f"most waiting for W   {waiting}   (by pp rank)"] if schedule.has_weights else []),
            f"static input slots   {slots}   (by pp rank; chunks share them: impl transformer_engine)",
            f"slots of graphs      {graphs}   (by pp rank; each chunk has its own graphs: impl local)",
        ]
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Pixels of one unit of time and of one row, and the units of time that one line shows."""

    unit: int
    row: int
    span: float

    @classmethod
    def of(cls, schedule: Schedule, duration: float) -> _Scale:
        """So that the digits of every microbatch fit into the bar of a forward."""
        unit = 10 + 7 * max(2, len(str(schedule.num_microbatches - 1)))
        return cls(unit, 34 if schedule.vpp > 1 else 26, min(max(duration, 1), _WIDEST // unit))


def schedule_svg(schedule: Schedule, simulation: Simulation) -> str:
    """The chart, with a title, a legend and a scale of time, in light or dark as the reader's screen is."""
    scale = _Scale.of(schedule, simulation.duration)
    line_height = _AXIS + schedule.pp * scale.row + _GAP
    starts = [i * scale.span for i in range(max(1, -int(-simulation.duration // scale.span)))]
    width = max(_LEFT + round(scale.span * scale.unit) + _MARGIN, 960 if schedule.has_weights else 760)
    height = _HEAD + len(starts) * line_height + _MARGIN
    title, cost = _words(schedule, simulation)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'class="schedule" role="img"><title>{title}; {cost}</title><style>{escape(_STYLE)}</style>',
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path class="hatch" d="M0 0V6"/></pattern></defs>',
        _box("page", 0, 0, width, height),
        f'<text class="heading" x="{_MARGIN}" y="24">{title}</text><text x="{_MARGIN}" y="42">{cost}</text>',
        *_legend(schedule),
    ]
    for i, start in enumerate(starts):
        parts += _line(schedule, simulation, scale, start, _HEAD + i * line_height)
    return "\n".join([*parts, "</svg>"])


def _words(schedule: Schedule, simulation: Simulation) -> tuple[str, str]:
    chunks = f", {schedule.vpp} chunks a rank" if schedule.vpp > 1 else ""
    title = f"{schedule.kind}: {schedule.pp} pipeline ranks{chunks}, {schedule.num_microbatches} microbatches"
    return title, f"bubble {simulation.bubble_fraction:.1%} of the time ({costs_in_words(schedule)})"


def _legend(schedule: Schedule) -> Iterator[str]:
    """A sample of each kind of bar, and of none."""
    chunk, on_chunk, room = (" c1", " on chunk 1", 250) if schedule.vpp > 1 else ("", "", 190)
    left, top = _MARGIN, 52
    shown = [("F", f"forward of microbatch 3{on_chunk}"), ("B", f"backward of microbatch 3{on_chunk}")]
    shown += [("W", "its gradients of weights")] * schedule.has_weights
    for kind, words in shown:
        fill = _BAR[kind][bool(chunk)]
        yield f'<g class="{kind} legend"><path class="bar" d="{box(left, top, 34, 16)}" fill="{fill}"/>'
        yield _hatch(kind, left, top, 34, 16)
        yield f'<text class="middle" x="{left + 17}" y="{top + 12}">3{chunk}</text></g>'
        yield f'<text x="{left + 40}" y="{top + 12}">{words}</text>'
        left += room + 20
    yield _box("row", left, top, 34, 16)
    yield f'<text x="{left + 40}" y="{top + 12}">bubble: the rank waits</text>'


def _line(schedule: Schedule, simulation: Simulation, scale: _Scale, start: float, top: int) -> Iterator[str]:
    """The actions of all ranks from ``start`` on, for as long as a line shows, below its scale of time."""
    end = min(start + scale.span, simulation.duration)
    yield from _ticks(scale, start, end, top, schedule.pp)
    for rank, (order, spans) in enumerate(zip(schedule.orders, simulation.spans, strict=True)):
        y = top + _AXIS + rank * scale.row
        yield f'<text x="{_MARGIN}" y="{y + scale.row // 2 + 2}">rank {rank}</text>'
        yield _box("row", _LEFT, y, (end - start) * scale.unit, scale.row - 4)
        for action, (first, last) in zip(order, spans, strict=True):
            if first < end and last > start:
                left = _LEFT + (max(first, start) - start) * scale.unit
                width = (min(last, end) - max(first, start)) * scale.unit
                yield _bar(action, left, y, width, scale.row - 4, schedule.vpp > 1)


def _ticks(scale: _Scale, start: float, end: float, top: int, num_rows: int) -> Iterator[str]:
    """A number every few forwards, and a stroke down to the rows."""
    step = 5 if scale.span > 20 else 2
    bottom = top + _AXIS + num_rows * scale.row - 4
    first = -int(-start // step) * step
    yield f'<text class="small" x="{_MARGIN}" y="{top + 10}">time</text>'
    for time in range(first, int(end) + 1, step):
        x = _LEFT + (time - start) * scale.unit
        yield f'<path class="tick" d="M{x:g} {top + 13}V{bottom}"/>'
        yield f'<text class="small middle" x="{x:g}" y="{top + 10}">{time}</text>'


def _bar(action: Action, left: float, top: int, width: float, height: int, with_chunk: bool) -> str:
    fill = _BAR[action.kind][action.chunk % len(_BAR[action.kind])]
    middle = left + width / 2
    chunk = f'<text class="chunk" x="{middle:g}" y="{top + 25}">c{action.chunk}</text>' if with_chunk else ""
    return (
        f'<g class="action {action.kind}"><title>{action}</title>'
        f'<rect class="bar" x="{left:g}" y="{top}" width="{width:g}" height="{height}" fill="{fill}"/>'
        f"{_hatch(action.kind, left, top, width, height)}"
        f'<text x="{middle:g}" y="{top + (13 if with_chunk else 15)}">{action.microbatch}</text>{chunk}</g>'
    )


def _hatch(kind: str, left: float, top: float, width: float, height: float) -> str:
    return f'<path d="{box(left, top, width, height)}" fill="url(#hatch)"/>' if kind == "B" else ""


def _box(name: str, left: float, top: float, width: float, height: float) -> str:
    return f'<path class="{name}" d="{box(left, top, width, height)}"/>'
