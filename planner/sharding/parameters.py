"""One rank's part of a parameter, and the axes over which its gradient is summed.

    dp, edp     every rank has the gradient of its own microbatches: edp for experts, dp for all others; dp-cp if
                it has only its own tokens of these
    tp, etp     every rank has a partial gradient: placement R, or a replicated segment
    embedding   several stages hold the parameter (a tied weight)
    counted     the gradient norm counts only the first of equal copies, over tp or etp or over stages

``ParameterPlan`` is the row of the full parameter, ``LocalParameter`` the part of one rank of one stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import fx

from passes.errors import require
from passes.moe.layers import ExpertPart
from passes.parameters import LocalParameter, axis_of
from passes.program.matrices import Matrices
from passes.types.types import I, Placement, Segment
from planner.decisions import Decisions
from planner.mesh import REPLICA
from planner.sharding.boxes import Part, part_over
from planner.spec.sections import STYLES


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter: its global ``shape``, and the part of a rank that holds it, over tp, or over etp and ep (experts).

    ``dim`` is sharded in ``segments`` (global sizes), each sharded by itself, except those with an index in
    ``whole_segments``, which are replicated. ``padding``: elements without data that make the last segment divisible.
    ``aliases``: other names of the same tied parameter. ``origin``: "solver", "default" or the spec's line.
    ``stages``: all stages that hold it. ``num_experts``: of experts with axes of their own, else 0: the parameter
    stacks them on ``expert_dim``, which is sharded over ep, or belongs to ``expert_number``, on one ep rank. ``group``:
    its own settings of the optimizer, in words. ``matrices``: of a hidden weight, if an update rule needs them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    style: str
    dim: int | None
    segments: tuple[int, ...]
    local_shape: tuple[int, ...]
    stages: tuple[int, ...]
    reason: str
    aliases: tuple[str, ...] = ()
    origin: str = "default"
    where: str = ""
    whole_segments: tuple[int, ...] = ()
    padding: int = 0
    expert_dim: int = -1
    expert_number: int = -1
    num_experts: int = 0
    group: str = ""
    matrices: Matrices | None = None

    @classmethod
    def of(cls, part: Part, *, name: str, shape: tuple[int, ...], **rest: Any) -> ParameterPlan:
        """Return the row of a parameter with this part on a rank. ``rest``: the other fields."""
        cut: dict[str, Any] = {"dim": None, "segments": ()}
        placement, expert = part.placement, part.expert
        if placement.is_sharded:
            whole = tuple(i for i, s in enumerate(placement.segments) if not s.sharded)
            cut = {
                "dim": placement.dim,
                "segments": placement.sizes,
                "whole_segments": whole,
                "padding": placement.padding,
            }
        if expert is not None:
            cut |= {"expert_dim": expert.dim, "expert_number": expert.number, "num_experts": expert.num_experts}
        return cls(name=name, shape=tuple(shape), local_shape=part.local_shape(tuple(shape)), **cut, **rest)

    def __post_init__(self) -> None:
        require(self.style in STYLES, f"{self.name} has the unknown style {self.style}")
        require(
            len(self.local_shape) == len(self.shape), f"{self.name}: {self.local_shape} is no shard of {self.shape}"
        )
        uncut = [n for d, n in enumerate(self.local_shape) if d not in (self.dim, self.expert_dim)]
        same = [n for d, n in enumerate(self.shape) if d not in (self.dim, self.expert_dim)]
        require(uncut == same, f"{self.name} is whole and yet cut: {self.local_shape} of {self.shape}")
        if self.dim is None:
            require(not self.segments, f"{self.name} has segments and no dim that is cut")
        else:
            require(0 <= self.dim < len(self.shape), f"{self.name} is cut on dim {self.dim} of {len(self.shape)}")
            require(sum(self.segments) == self.shape[self.dim], f"{self.name}: segments {self.segments} miss its dim")
        self._check_experts()

    def _check_experts(self) -> None:
        dim, number = self.expert_dim, self.expert_number
        if not self.num_experts:
            require(dim == number == -1, f"{self.name} is of no expert and has a place among them")
            return
        require(self.style == "expert", f"{self.name} is of experts and has the style {self.style}")
        require((dim == -1) != (number == -1), f"{self.name} must be a stack of experts, or of one")
        if dim >= 0:
            is_stack = dim < len(self.shape) and self.shape[dim] == self.num_experts
            require(is_stack, f"{self.name}: dim {dim} of {self.shape} counts no {self.num_experts} experts")
        else:
            require(number < self.num_experts, f"{self.name} is of expert {number} of {self.num_experts}")

    @property
    def expert(self) -> ExpertPart | None:
        """The expert part that it holds, if experts have axes of their own."""
        return ExpertPart(self.num_experts, self.expert_dim, self.expert_number) if self.num_experts else None

    @property
    def axis(self) -> str:
        return axis_of(self.expert)

    @property
    def placement(self) -> Placement:
        """Its placement over its axis; I if each rank holds all of it."""
        if self.dim is None:
            return I
        segments = tuple(Segment(n, i not in self.whole_segments) for i, n in enumerate(self.segments))
        return Placement("V", self.dim, segments, self.padding)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def local_parameter(decisions: Decisions, node: fx.Node, stage: int, place: Mapping[str, int]) -> LocalParameter:
    """Return the parameter of a captured placeholder on a rank of ``stage``. ``place``: its index on each axis."""
    part, mesh = part_of_node(decisions, node, place), decisions.mesh
    placement, axis = part.placement, axis_of(part.expert)
    stages = decisions.stages.parameter_stages.get(node.name, (stage,))
    tied = stages if len(stages) > 1 else ()
    partial = mesh.size(axis) > 1 and (placement.kind == "R" or placement.has_whole_segment)
    value = node.meta["val"]
    shape = tuple(value.shape)
    sums = {"embedding": tied, axis: partial, REPLICA: mesh.replica > 1 and part.expert is None}
    return LocalParameter(
        decisions.program.parameters[node.name],
        part.local_shape(shape),
        value.dtype,
        placement,
        global_shape=shape,
        partial_over=tuple(name for name, is_needed in sums.items() if is_needed),
        counted=(placement.is_sharded or place[axis] == 0) and stage == min(stages),
        tied_stages=tied,
        requires_grad=bool(node.meta["grad"]),
        expert=part.expert,
        data_axis=mesh.shared_axis,
    )


def part_of_node(decisions: Decisions, node: fx.Node, place: Mapping[str, int]) -> Part:
    """Return the part of a captured placeholder that the rank at ``place`` holds."""
    expert = decisions.expert_parts.get(node.name)
    return part_over(axis_of(expert), decisions.placements.of(node), expert, decisions.mesh, place)


def parameters_of_rank(
    decisions: Decisions, pp_rank: int, place: Mapping[str, int] | None = None
) -> Iterator[LocalParameter]:
    """Yield a rank's parameters, chunk by chunk, in graph order; a tied weight once for each of its chunks.

    ``place``: the rank's index on each axis (Mesh.place); default: of the first rank of ``pp_rank``.
    """
    program, stages, mesh = decisions.program, decisions.stages, decisions.mesh
    place = mesh.place(mesh.rank_of(pp=pp_rank)) if place is None else place
    parts = decisions.expert_parts
    held = [
        n
        for n in program.graph.graph.find_nodes(op="placeholder")
        if n.name in program.parameters and (n.name not in parts or parts[n.name].is_held(mesh.ep, place["ep"]))
    ]
    for stage in mesh.stages_of(pp_rank):
        for node in held:
            if stage in stages.parameter_stages.get(node.name, ()):
                yield local_parameter(decisions, node, stage, place)
