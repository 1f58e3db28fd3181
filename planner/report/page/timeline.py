"""The chart of a plan's schedule inside of a page; a long one is cut."""

from __future__ import annotations

from dataclasses import dataclass, replace

from passes.errors import PlanError
from planner.pipeline.schedule import CUSTOM, KINDS, Schedule
from planner.pipeline.simulate import Simulation, simulate
from planner.report.timeline import schedule_svg
from planner.tables.tables import Tables

MOST_DRAWN = 1200  # actions: some 200 bytes and four elements each


@dataclass(frozen=True, slots=True)
class Timeline:
    """``svg`` is complete and safe; ``note``: the part of the schedule that is not drawn."""

    svg: str
    note: str = ""


def timeline(plan: Tables) -> Timeline | None:
    """None if there is one rank only, or if the orders of a plan changed by hand do not fit each other."""
    row, mesh = plan.schedule, plan.mesh
    if mesh.pp == 1:
        return None
    try:
        kind = row.kind if row.kind in KINDS else CUSTOM  # of a file that was changed by hand it may be any words
        schedule = Schedule(kind, mesh.pp, mesh.vpp, row.num_microbatches, mesh.pp, row.actions, mesh.fold)
        simulation = simulate(schedule)
    except PlanError:
        return None
    end = _end(simulation)
    note = ""
    if end < simulation.duration:
        drawn = sum(start < end for spans in simulation.spans for start, _ in spans)
        total = sum(map(len, simulation.spans))
        note = f"The chart shows the first {drawn:,} of {total:,} actions; the table below lists all."
    return Timeline(schedule_svg(schedule, replace(simulation, duration=end)), note)


def _end(simulation: Simulation) -> float:
    """The time at which as many actions have begun as are drawn."""
    starts = sorted(start for spans in simulation.spans for start, _ in spans)
    return simulation.duration if len(starts) <= MOST_DRAWN else starts[MOST_DRAWN]
