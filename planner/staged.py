"""What lowering reads of a model: the captured program with its types and stages, and one stage of it for one rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from passes.base import LowerContext, Staged, StageGraph
from passes.extract import extract
from passes.lower import LOCAL
from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from passes.regions import Region
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.sharding.shards import Shards


def staged(decisions: Decisions, shards: Shards) -> Staged:
    """The typed and cut program, with the changes of type of each stage."""
    return Staged(
        decisions.program,
        decisions.placements,
        decisions.stages,
        decisions.mesh,
        shards.changes,
        tuple(decisions.terms.denominators),
        decisions.experts,
        decisions.asked,
        decisions.regather,
        decisions.own_tokens,
    )


def more_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes of experts, if they have their own, and cp, if cp > 1."""
    return (("etp", "ep") if mesh.has_expert_axes else ()) + (("cp",) if mesh.cp > 1 else ())


def local_stage(decisions: Decisions, shards: Shards, index: int, regions: Sequence[Region] = ()) -> StageGraph:
    """The program of stage ``index`` on rank 0 of every axis but pp, before any part of it is captured, compiled or
    recomputed. It can be read, and run on tensors without values: its handles are bound to no group.
    """
    mesh = decisions.mesh
    sizes = {axis: AxisHandle(axis, mesh.size(axis), 0) for axis in ("tp", mesh.data_axis, *more_axes(mesh))}
    context = LowerContext(
        staged(decisions, shards),
        sizes.pop("tp"),
        RandomState(decisions.seed, 0),
        torch.device("cpu"),
        regions=tuple(regions),
        place=mesh.place(0),
        data=sizes.pop(mesh.data_axis),
        axes=sizes,
    )
    stage = extract(context, index)
    for step in LOCAL:
        step.run(stage, context)
    return stage
