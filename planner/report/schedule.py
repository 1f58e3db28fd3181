"""A schedule for other programs and for the eye: JSON, and a table of actions.

In JSON, ``order`` writes +(chunk + 1) for a forward and -(chunk + 1) for a backward; ``steps`` has the W too.
"""

from __future__ import annotations

from typing import Any

from planner.pipeline.actions import without_weights
from planner.pipeline.schedule import Schedule
from planner.pipeline.simulate import Simulation
from planner.pipeline.slots import num_graph_slots, num_static_input_slots


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
        "static_input_slots": num_static_input_slots(order),
        "graph_slots": num_graph_slots(order),
    }


def costs_in_words(schedule: Schedule) -> str:
    """The costs that the simulation assumes if no others are known."""
    return "F, B and W cost the same" if schedule.has_weights else "a backward costs two forwards"


def schedule_text(schedule: Schedule, simulation: Simulation) -> str:
    """The step by rank grid, then its costs."""
    peaks = " ".join(map(str, simulation.peak_in_flight))
    warmups = " ".join(str(schedule.num_warmup(rank)) for rank in range(schedule.pp))
    slots = " ".join(str(num_static_input_slots(order)) for order in schedule.orders)
    graphs = " ".join(str(num_graph_slots(order)) for order in schedule.orders)
    weights = ", W its weight gradients" if schedule.has_weights else ""
    waiting = " ".join(map(str, simulation.peak_waiting))
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
