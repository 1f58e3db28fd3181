"""What one rank holds of a parameter and with whom it adds gradients up: decided here, and read by everyone else.

    tp          every rank has a partial gradient: placement R, or a segment that each rank holds whole
    embedding   several stages hold the parameter (a tied weight)
    counted     of equal copies, over tp or over stages, the first alone counts in the gradient norm

``ParameterPlan`` is the row of the whole parameter, ``LocalParameter`` what one rank of one stage has of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from planner.decisions import Decisions
from planner.errors import require
from planner.placement.types import I, Placement, Segment
from planner.spec.sections import STYLES


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter: global ``shape``, and what one rank of the tp group (for experts, of etp and ep) holds.

    ``dim`` is cut; ``segments`` are its global sizes, each cut for itself, except those whose index is in
    ``whole_segments``: every rank holds them whole. ``padding`` elements without data make the last one divide.
    ``aliases``: other names of the same tied parameter. ``origin``: "solver", "default" or the spec's line.
    ``stages``: every stage that holds it.
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

    @classmethod
    def of(cls, placement: Placement, tp: int, *, name: str, shape: tuple[int, ...], **rest: Any) -> ParameterPlan:
        """The row of a parameter with this tp ``placement``; ``rest`` are the other fields."""
        cut = {"dim": None, "segments": ()}
        if placement.is_sharded:
            whole = tuple(i for i, s in enumerate(placement.segments) if not s.sharded)
            cut = {
                "dim": placement.dim,
                "segments": placement.sizes,
                "whole_segments": whole,
                "padding": placement.padding,
            }
        return cls(name=name, shape=tuple(shape), local_shape=placement.local_shape(tuple(shape), tp), **cut, **rest)

    def __post_init__(self) -> None:
        require(self.style in STYLES, f"{self.name} has the unknown style {self.style}")
        require(
            len(self.local_shape) == len(self.shape), f"{self.name}: {self.local_shape} is no shard of {self.shape}"
        )
        if self.dim is None:
            require(not self.segments and self.local_shape == self.shape, f"{self.name} is whole and yet cut")
        else:
            require(0 <= self.dim < len(self.shape), f"{self.name} is cut on dim {self.dim} of {len(self.shape)}")
            require(sum(self.segments) == self.shape[self.dim], f"{self.name}: segments {self.segments} miss its dim")

    @property
    def placement(self) -> Placement:
        """How it is cut over tp; I where each rank holds all of it."""
        if self.dim is None:
            return I
        segments = tuple(Segment(n, i not in self.whole_segments) for i, n in enumerate(self.segments))
        return Placement("V", self.dim, segments, self.padding)

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class LocalParameter:
    """A parameter on one rank of one stage: its user's dotted name, its cut, and who must add gradients together.

    ``partial_over``: mesh groups whose ranks hold partial gradients of it at the end of a step ("tp" for type R,
    "embedding" for a tied weight that stands on several stages); after the dp reduction they are summed there.
    ``counted``: whether this rank counts the parameter in the global gradient norm (each logical element counts once).
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    global_shape: tuple[int, ...]
    partial_over: tuple[str, ...] = ()
    counted: bool = True
    tied_stages: tuple[int, ...] = ()  # stages that hold it, where more than one
    requires_grad: bool = True

    @property
    def has_whole_segment(self) -> bool:
        """Whether part of it is held whole by every tp rank, with partial gradients, beside what is cut."""
        return self.placement.has_whole_segment and "tp" in self.partial_over

    def whole_runs(self, tp: int) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the local sharded dim that every tp rank holds whole."""
        runs, start = [], 0
        for segment in self.placement.segments:
            stop = start + segment.local(tp)
            if not segment.sharded:
                runs.append((start, stop))
            start = stop
        return tuple(runs)

    def num_whole_elements(self, tp: int, stop: int) -> int:
        """How many of the first ``stop`` elements of the local tensor, flattened, every tp rank holds."""
        inner = prod(self.shape[self.placement.dim + 1 :])
        full, rest = divmod(stop, self.shape[self.placement.dim] * inner)
        return sum(
            (last - first) * inner * full + max(0, min(rest, last * inner) - first * inner)
            for first, last in self.whole_runs(tp)
        )


def local_parameter(decisions: Decisions, node: fx.Node, stage: int, tp_rank: int) -> LocalParameter:
    """The parameter of a captured placeholder as a rank of ``stage`` has it."""
    placement, tp = decisions.placements.of(node), decisions.mesh.tp
    stages = decisions.stages.parameter_stages.get(node.name, (stage,))
    tied = stages if len(stages) > 1 else ()
    partial = tp > 1 and (placement.kind == "R" or placement.has_whole_segment)
    value = node.meta["val"]
    shape = tuple(value.shape)
    return LocalParameter(
        decisions.program.parameters[node.name],
        placement.local_shape(shape, tp),
        value.dtype,
        placement,
        shape,
        (("embedding",) if tied else ()) + (("tp",) if partial else ()),
        (placement.is_sharded or tp_rank == 0) and stage == min(stages),
        tied,
        bool(node.meta["grad"]),
    )


def parameters_of_rank(decisions: Decisions, pp_rank: int, tp_rank: int = 0) -> Iterator[LocalParameter]:
    """What a pp rank holds, chunk by chunk, in graph order; a tied weight comes once for each of its chunks."""
    program, stages = decisions.program, decisions.stages
    placeholders = [n for n in program.graph.graph.find_nodes(op="placeholder") if n.name in program.parameters]
    for stage in range(pp_rank, stages.num_stages, decisions.mesh.pp):
        for node in placeholders:
            if stage in stages.parameter_stages.get(node.name, ()):
                yield local_parameter(decisions, node, stage, tp_rank)
