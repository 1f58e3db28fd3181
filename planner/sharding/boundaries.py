"""The values sent from one stage to the next: the live values at the cut, in local shapes, never as partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from passes.partition.type_changes import sent_type
from passes.program.stages import BoundaryPlan
from passes.types.types import Placement
from planner.decisions import Decisions


def boundary(decisions: Decisions, cut: int) -> tuple[BoundaryPlan, ...]:
    """The values that stage ``cut`` sends to stage ``cut + 1``; nothing before the first and after the last."""
    stages = decisions.stages
    if not 0 <= cut < stages.num_stages - 1:
        return ()
    placements, program = decisions.placements, decisions.program
    return tuple(value_at(decisions, n, sent_type(placements.of(program.node(n)))) for n in stages.live[cut])


def crossing(values: Sequence[BoundaryPlan], kind: str) -> list[BoundaryPlan]:
    """Of the values at a boundary those that cross it forward ("F"), or that a gradient crosses it for ("B")."""
    return [value for value in values if kind == "F" or value.requires_grad]


def one_way(boundaries: Sequence[Sequence[BoundaryPlan]]) -> list[int]:
    """The boundaries that no gradient crosses: their receiver answers nothing."""
    return [cut for cut, values in enumerate(boundaries) if not crossing(values, "B")]


def value_at(decisions: Decisions, name: str, placement: Placement) -> BoundaryPlan:
    """A value as one rank holds it in a type."""
    node = decisions.program.node(name)
    value = node.meta["val"]
    shape = placement.local_shape(tuple(value.shape), decisions.mesh.tp)
    dtype = str(value.dtype).removeprefix("torch.")
    size = prod(shape) * value.element_size()
    return BoundaryPlan(name, shape, dtype, size, str(placement), bool(node.meta["grad"]))
