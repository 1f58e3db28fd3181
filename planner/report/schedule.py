"""A schedule as JSON, as a table of actions, and as a chart.

In JSON, ``order`` has +(chunk + 1) for a forward and -(chunk + 1) for a backward; ``steps`` has the actions W too. The
chart is one self-contained SVG file, in which time runs to the right and each pp rank has a row:

    forward    a light, plain bar with dark digits
    backward   a dark, hatched bar with white digits
    weights    a bar of medium tone with white digits: the gradients of weights, if they are delayed (W)
    digits     the microbatch; below them, if ranks have several chunks, c and the chunk, each in its own tone
    bubble     the empty row between bars

A long timeline continues on the next line, like text; a bar that crosses the end of a line appears in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.pipeline.actions import without_weights
from planner.pipeline.message_slots import slots_by_kind
from planner.pipeline.schedule import Action, Schedule
from planner.pipeline.simulate import Simulation
from planner.regions.static_memory import slots_of
from planner.report.page.engine import render

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
    """Return plain data: the schedule table, each rank's actions in order, and the bubble as a fraction of time."""
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
    """Return the costs that the simulation assumes by default, in words."""
    return "F, B and W cost the same" if schedule.has_weights else "a backward costs two forwards"


def schedule_text(schedule: Schedule, simulation: Simulation) -> str:
    """Return the grid of steps and ranks, then bubble, warm-up and slots."""
    ranks = [_rank_to_dict(schedule, rank) for rank in range(schedule.pp)]
    counts = [[rank[key] for rank in ranks] for key in ("num_warmup", "static_input_slots", "graph_slots")]
    texts = (" ".join(map(str, of)) for of in (*counts, simulation.peak_in_flight, simulation.peak_waiting))
    warmups, slots, graphs, peaks, waiting = texts
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
    """``unit``: pixels of one unit of time; ``row``: pixels of one row; ``span``: units of time of one line."""

    unit: int
    row: int
    span: float

    @classmethod
    def of(cls, schedule: Schedule, duration: float) -> _Scale:
        """Return a scale at which the digits of every microbatch fit into the bar of a forward."""
        unit = 10 + 7 * max(2, len(str(schedule.num_microbatches - 1)))
        return cls(unit, 34 if schedule.vpp > 1 else 26, min(max(duration, 1), _WIDEST // unit))


def schedule_svg(schedule: Schedule, simulation: Simulation) -> str:
    """Return the chart, with a title, a legend and a time axis, in the light or dark colours of the reader's screen."""
    scale = _Scale.of(schedule, simulation.duration)
    height = _AXIS + schedule.pp * scale.row + _GAP
    starts = [i * scale.span for i in range(max(1, -int(-simulation.duration // scale.span)))]
    chunks = f", {schedule.vpp} chunks a rank" if schedule.vpp > 1 else ""
    return render(
        "schedule.svg.j2",
        title=f"{schedule.kind}: {schedule.pp} pipeline ranks{chunks}, {schedule.num_microbatches} microbatches",
        cost=f"bubble {simulation.bubble_fraction:.1%} of the time ({costs_in_words(schedule)})",
        width=max(_LEFT + round(scale.span * scale.unit) + _MARGIN, 960 if schedule.has_weights else 760),
        height=_HEAD + len(starts) * height + _MARGIN,
        style=_STYLE,
        margin=_MARGIN,
        left=_LEFT,
        row_height=scale.row,
        has_chunks=schedule.vpp > 1,
        legend=_legend(schedule),
        lines=[_line(schedule, simulation, scale, start, _HEAD + i * height) for i, start in enumerate(starts)],
    )


def _legend(schedule: Schedule) -> list[tuple[str, str, int, str]]:
    """Return (kind, colour, x, words) of a sample bar of each kind, and of the bubble."""
    on_chunk, step = (" on chunk 1", 270) if schedule.vpp > 1 else ("", 210)
    shown = [("F", f"forward of microbatch 3{on_chunk}"), ("B", f"backward of microbatch 3{on_chunk}")]
    shown += [("W", "its gradients of weights")] * schedule.has_weights
    samples = [(kind, _BAR[kind][schedule.vpp > 1], words) for kind, words in shown]
    places = enumerate([*samples, ("", "", "bubble: the rank waits")])
    return [(kind, fill, _MARGIN + i * step, words) for i, (kind, fill, words) in places]


def _line(schedule: Schedule, simulation: Simulation, scale: _Scale, start: float, top: int) -> dict[str, Any]:
    """Return one line of the chart: the actions of all ranks from time ``start``, and ticks every few forwards."""
    end, step = min(start + scale.span, simulation.duration), 5 if scale.span > 20 else 2

    def x_of(time: float) -> float:
        return _LEFT + (time - start) * scale.unit

    def bars(rank: int) -> Iterator[tuple[Action, str, float, float]]:
        for action, (first, last) in zip(schedule.orders[rank], simulation.spans[rank], strict=True):
            if first < end and last > start:
                left, fills = x_of(max(first, start)), _BAR[action.kind]
                yield action, fills[action.chunk % len(fills)], left, x_of(min(last, end)) - left

    return {
        "top": top,
        "bottom": top + _AXIS + schedule.pp * scale.row - 4,
        "width": x_of(end) - _LEFT,
        "ticks": [(x_of(time), time) for time in range(-int(-start // step) * step, int(end) + 1, step)],
        "rows": [{"y": top + _AXIS + rank * scale.row, "bars": bars(rank)} for rank in range(schedule.pp)],
    }
