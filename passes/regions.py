"""The parts of blocks that a CUDA graph captures, and the values that cross their borders; the planner decides them.

A value crosses in the type that it has there. A change of type runs in the region of its readers if they are all in
one, else in the region that makes the value: so a gather before a region belongs to it, and the smaller part crosses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from passes.partition.type_changes import TypeChange
from passes.program.ops.aten import shares_memory
from passes.program.stages import BoundaryPlan, StageAssignment
from passes.types.types import Placement


@dataclass
class Region:
    """A part of a block that runs as one call. ``refused``: why no graph captures it, empty if one does.

    ``nodes``: captured names. ``inputs`` and ``outputs``: the crossing values, by (name, type), in the order of its
    first use.
    ``through``: inputs that are read more than once here and again after it, as a residual is. Their later gradient
    comes in, so that addends are summed in the same order as without graphs: sums are equal to the last bit.
    """

    index: int
    stage: int
    block: str
    scope: str
    nodes: frozenset[str]
    refused: str = ""
    inputs: dict[tuple[str, Placement], BoundaryPlan] = field(default_factory=dict)
    outputs: dict[tuple[str, Placement], BoundaryPlan] = field(default_factory=dict)
    through: set[tuple[str, Placement]] = field(default_factory=set)

    @property
    def static_bytes(self) -> int:
        """Of one slot: inputs and outputs, the gradients of those that carry one, and of inputs that pass through."""
        crossing = (*self.inputs.values(), *self.outputs.values())
        of_later = sum(self.inputs[key].bytes for key in self.through)
        return sum(value.bytes * (2 if value.requires_grad else 1) for value in crossing) + of_later

    @property
    def num_graphs(self) -> int:
        """Of one slot: a forward, and a backward if an output carries a gradient."""
        return 1 + any(value.requires_grad for value in self.outputs.values())


_Home = TypeVar("_Home")


def home_of(change: TypeChange, owner: Mapping[str, _Home]) -> _Home | None:
    """The region (or other part of the graph) in which a change of type runs; None outside of all.

    A gathered value never crosses a border in full.
    """
    made = owner.get(change.value)
    if change.before.kind == "P":
        return made
    homes = {id(home): home for home in map(owner.get, change.readers)}
    only = next(iter(homes.values())) if len(homes) == 1 else None
    return only if only is not None or (change.how.name == "gather" and len(homes) == 1) else made


def homes(regions: Sequence[Region]) -> frozenset[str]:
    """The captured names of all ops that run inside a graph."""
    return frozenset(name for region in regions if not region.refused for name in region.nodes)


def lies_in_a_graph(
    value: fx.Node, stage: int, stages: StageAssignment, rank_of: Callable[[int], int], home: frozenset[str]
) -> bool:
    """Whether ``value``, as ``stage`` reads it, is in the static memory of a graph: a region's output or a view of it.

    A stage hands its values to the next one on the same rank without a copy.
    """
    while value.name not in home:
        if not shares_memory(value):
            return False
        value = value.all_input_nodes[0]
    return rank_of(stages.stage_of[value.name]) == rank_of(stage)
