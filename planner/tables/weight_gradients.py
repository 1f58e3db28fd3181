"""Which gradients of weights a W of the schedule makes, and which come with their backward, and why."""

from __future__ import annotations

from collections.abc import Iterator

from passes.blocks.places import glob_of
from planner.pipeline.schedule import SchedulePlan
from planner.regions.weight_gradients import BY_AUTOGRAD, CAN_WAIT, IN_GRAPH, WeightGradient, weight_gradients
from planner.saved.lowered import Lowered
from planner.tables.rows import Diagnostic

WHERE = "pipeline.schedule"


def weight_gradient_notes(lowered: Lowered, schedule: SchedulePlan) -> Iterator[Diagnostic]:
    """If the schedule has W: one note of the weight gradients that wait, and one for each reason why others do not."""
    if not schedule.has_weights:
        return
    rows = weight_gradients(lowered)
    waiting = {row.name for row in rows if row.how == CAN_WAIT}
    yield Diagnostic("info", f"gradients of {len(waiting)} parameters wait for W: those of matrix products", WHERE)
    others: dict[str, list[str]] = {}
    for row in rows:
        if row.how != CAN_WAIT:
            others.setdefault(_reason(row), []).append(glob_of(row.name))
    for reason, names in others.items():
        yield Diagnostic("info", f"computed with the backward, {reason}: {', '.join(dict.fromkeys(names))}", WHERE)


def _reason(row: WeightGradient) -> str:
    if row.how == BY_AUTOGRAD:
        return f"as {row.reason}"
    return (
        "in CUDA graphs"
        if row.how == IN_GRAPH
        else "because they read memory of a CUDA graph that the next microbatch reuses"
    )
