"""A schedule for the eye and for other programs: JSON, a table of actions, a time chart as SVG.

In JSON, ``order`` writes +(chunk + 1) for a forward and -(chunk + 1) for a backward.
"""

from __future__ import annotations

from typing import Any

from planner.pipeline.schedule import Action, Schedule
from planner.pipeline.simulate import Simulation
from planner.pipeline.slots import num_static_input_slots

_UNIT, _ROW, _LEFT = 24, 30, 60  # pixels: one unit of time, one rank, the names of the ranks
_COLORS = {"F": ("#9ecae1", "#6baed6", "#4292c6", "#2171b5"), "B": ("#a1d99b", "#74c476", "#41ab5d", "#238b45")}


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
        "order": [action.chunk + 1 if action.kind == "F" else -action.chunk - 1 for action in order],
        "steps": [list(action) for action in order],
        "static_input_slots": num_static_input_slots(order),
    }


def schedule_text(schedule: Schedule, simulation: Simulation) -> str:
    """The step by rank grid, then what it costs."""
    peaks = " ".join(map(str, simulation.peak_in_flight))
    warmups = " ".join(str(schedule.num_warmup(rank)) for rank in range(schedule.pp))
    slots = " ".join(str(num_static_input_slots(order)) for order in schedule.orders)
    return "\n".join(
        [
            f"{schedule.kind}: pp {schedule.pp}, vpp {schedule.vpp}, {schedule.num_microbatches} microbatches",
            "F3.1 is the forward of microbatch 3 on chunk 1, B its backward; a dot is a rank that waits",
            "",
            simulation.grid(),
            "",
            f"bubble               {simulation.bubble_fraction:.1%} of the time (a backward costs two forwards)",
            f"warm-up forwards     {warmups}   (by pp rank)",
            f"peak in flight       {peaks}   (by pp rank)",
            f"static input slots   {slots}   (by pp rank)",
        ]
    )


def schedule_svg(schedule: Schedule, simulation: Simulation) -> str:
    """A chart: a line for each pp rank, time to the right, forwards blue and backwards green, darker by chunk."""
    width, height = _LEFT + round(simulation.duration * _UNIT) + 10, schedule.pp * _ROW + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><title>{schedule.kind}, bubble {simulation.bubble_fraction:.1%}</title>'
    ]
    for rank, (order, spans) in enumerate(zip(schedule.orders, simulation.spans, strict=True)):
        top = 5 + rank * _ROW
        parts.append(f'<text x="5" y="{top + 17}">rank {rank}</text>')
        parts += [_bar(action, start, end, top) for action, (start, end) in zip(order, spans, strict=True)]
    return "\n".join([*parts, "</svg>"])


def _bar(action: Action, start: float, end: float, top: int) -> str:
    left, width = _LEFT + start * _UNIT, (end - start) * _UNIT
    shades = _COLORS[action.kind]
    return (
        f'<g><title>{action}</title><rect x="{left:g}" y="{top}" width="{width:g}" height="{_ROW - 6}" '
        f'fill="{shades[action.chunk % len(shades)]}" stroke="white"/>'
        f'<text x="{left + width / 2:g}" y="{top + 16}" text-anchor="middle">{action.microbatch}</text></g>'
    )
