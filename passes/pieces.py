"""Pieces of a stage: the parts of blocks that are recomputed together, and the runs of ops that are compiled.

A CUDA graph holds its own recompute: the captured backward contains the rerun for the tensors that its forward freed.

The parts of blocks that a CUDA graph captures are regions. A value crosses their borders in the type that it has there.
A change of type runs in the region of its readers if they are all in one, else in the region that makes the value: so a
gather before a region belongs to it, and the smaller part crosses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx

from passes.partition.type_changes import TypeChange
from passes.program.ops.aten import shares_memory
from passes.program.program import BoundaryPlan, StageAssignment
from passes.types.types import Placement

Key = tuple[str, Placement]  # captured name of a value, and the type in which it is here

NONE, FULL, SELECTIVE = "none", "full", "selective"  # kinds of recompute


@dataclass(frozen=True, slots=True)
class AgainCall:
    """A call of the rerun. ``bytes``: of the freed memory that it restores, for one microbatch; ``flops``, ``moved``:
    its cost.

    ``changed``: if it is not an op but a change of type.
    """

    name: str
    bytes: int
    flops: int
    moved: int
    changed: TypeChange | None = None


@dataclass
class Piece:
    """``nodes``: captured names. ``region``: the captured part of the block that it is; None for a part that is not
    captured.

    ``needed``: for each freed memory, the values in it. ``kept``: values at which the rerun begins, beside inputs from
    outside. ``insides``: captured names of the ops with freed internal tensors. ``overwrites``: of the ops that run
    again because they overwrite an operand. ``again``: calls of the rerun. As memory of the stage's trace
    (planner.trace.trace): ``let_go`` after the forward, ``sources`` held for the rerun.
    """

    index: int
    stage: int
    block: str
    kind: str
    nodes: frozenset[str]
    region: int | None = None
    needed: tuple[frozenset[Key], ...] = ()
    kept: frozenset[Key] = frozenset()
    insides: frozenset[str] = frozenset()
    overwrites: frozenset[str] = frozenset()
    again: tuple[AgainCall, ...] = ()
    let_go: frozenset[int] = frozenset()
    sources: frozenset[int] = frozenset()


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
        """The bytes of one slot: inputs and outputs, their gradients, and those of inputs that pass through."""
        crossing = (*self.inputs.values(), *self.outputs.values())
        of_later = sum(self.inputs[key].bytes for key in self.through)
        return sum(value.bytes * (2 if value.requires_grad else 1) for value in crossing) + of_later

    @property
    def num_graphs(self) -> int:
        """The graphs of one slot: a forward, and a backward if an output carries a gradient."""
        return 1 + any(value.requires_grad for value in self.outputs.values())


_Home = TypeVar("_Home")


def home_of(change: TypeChange, owner: Mapping[str, _Home]) -> _Home | None:
    """Return the region (or other part of the graph) in which a change of type runs; None outside of all.

    A gathered value never crosses a border in full.
    """
    made = owner.get(change.value)
    if change.before.kind == "P":
        return made
    homes = {id(home): home for home in map(owner.get, change.readers)}
    only = next(iter(homes.values())) if len(homes) == 1 else None
    return only if only is not None or (change.how.name == "gather" and len(homes) == 1) else made


def regions_on(stage: int, regions: Sequence[Region]) -> dict[str, Region]:
    """Map each captured name to the captured region of a stage that holds it."""
    mine = [region for region in regions if region.stage == stage and not region.refused]
    return {name: region for region in mine for name in sorted(region.nodes)}


def homes(regions: Sequence[Region]) -> frozenset[str]:
    """Return the captured names of all ops that run inside a graph."""
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


class PieceHomes:
    """The homes of one stage's calls and type changes. Owns: captured name → its piece, and → its captured region."""

    def __init__(self, stage: int, pieces: Sequence[Piece], regions: Sequence[Region]) -> None:
        mine = [piece for piece in pieces if piece.stage == stage]
        self._owner = {name: piece for piece in mine for name in sorted(piece.nodes)}
        self._eager = {name: piece for name, piece in self._owner.items() if piece.region is None}
        self._regions = regions_on(stage, regions)
        self._captured = {piece.region: piece for piece in mine if piece.region is not None}

    def of_call(self, name: str) -> Piece | None:
        return self._owner.get(name)

    def of_change(self, change: TypeChange) -> Piece | None:
        """Return the piece of a change: a captured region that holds it keeps it, as lowering does."""
        region = home_of(change, self._regions)
        return home_of(change, self._eager) if region is None else self._captured.get(region.index)


@dataclass(frozen=True)
class CompiledPiece:
    """``nodes``: captured names, in the order of the graph. ``function``: equal for pieces that share one.

    ``leaves``: its results; unread ones too if another piece with the same function needs them.
    ``again``: whether the backward of a recomputed block reruns it.
    """

    index: int
    stage: int
    nodes: tuple[str, ...]
    function: int
    leaves: frozenset[str]
    again: bool = False
