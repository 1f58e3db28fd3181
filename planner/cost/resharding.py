"""Decide when weights in shards are freed (``optimizer.reshard: auto``): after each use, or once a step if they fit.

a number        so many blocks of each stage, the last ones, once a step: their backward is the first
once a step     each weight is gathered once, whatever the number of microbatches is; all of a rank are whole at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from passes.errors import PlanError
from passes.pieces import CompiledPiece, Piece
from planner.cluster.cluster import Cluster
from planner.cost.device_memory import on_device
from planner.cost.memory import memory_rows
from planner.cost.planned import too_large
from planner.pipeline.schedule import SchedulePlan
from planner.regions.static_memory import GraphSlots
from planner.saved.lowered import Lowered
from planner.sharding.residency import Unit
from planner.spec.fields import AUTO


def decide_reshard(
    asked: Any,
    lowered: Lowered,
    schedule: SchedulePlan,
    slots: Sequence[GraphSlots],
    recomputed: Sequence[Piece],
    compiled: Sequence[CompiledPiece],
    cluster: Cluster | None,
) -> Lowered:
    """``lowered``, with the answer in its shards. ``asked``: of the spec; without a cluster auto is true. Raises
    PlanError for a number above that of the model's blocks."""
    if isinstance(asked, int) and not isinstance(asked, bool):
        blocks = sum(map(len, lowered.decisions.stages.blocks_of_stage))
        if asked > blocks:
            fix = f"set a number up to {blocks}, or false to gather all weights once a step"
            what = f"optimizer.reshard is {asked}, and the model has {blocks} blocks"
            raise PlanError(what, where="optimizer.reshard", fix=fix)
        return replace(lowered, shards=replace(lowered.shards, kept=_last(asked, lowered)))
    has_choice = schedule.num_microbatches > 1 and any(buffer.gathers for buffer in lowered.shards.buffers)
    if asked != AUTO or cluster is None or not has_choice:
        return lowered
    once = replace(lowered, shards=replace(lowered.shards, reshards=False))
    rows = memory_rows(once, schedule, slots, recomputed, compiled)
    rows = on_device(rows, once.decisions.mesh, cluster, once.shards.buffers)
    return lowered if any(too_large(rows, cluster)) else once


def _last(count: int, lowered: Lowered) -> tuple[frozenset[Unit], ...]:
    """Of each pp rank the units of the last visits of its stages."""
    mesh = lowered.decisions.mesh
    visits = [lowered.visits(stage)[-count:] for stage in range(lowered.num_stages)]
    return tuple(
        frozenset(unit for stage in mesh.stages_of(rank) for visit in visits[stage] for unit in visit.units)
        for rank in range(mesh.pp)
    )
