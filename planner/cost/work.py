"""The cost of one cut of a model: kernels, collectives and bytes of each block, free of any cluster.

Decisions, Shards → CutWork        a trace of each stage, call by call (planner.saved.trace)
CutWork.at(micro)                  the same for another size of a microbatch: no capture, no trace
planner.cost.estimate              CutWork, a layout, a cluster → seconds and bytes
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from passes.pieces import Piece
from planner.cost.cut.build import Builder
from planner.cost.cut.units import CutWork
from planner.decisions import Decisions
from planner.recompute.asked import NONE
from planner.recompute.decide import decide_recompute
from planner.regions.regions import decide_regions
from planner.saved.lowered import Lowered
from planner.sharding.shards import Shards
from planner.spec.spec import Spec

AS_PLANNED = "as planned"  # the kind of recompute of a plan with a spec that names blocks


def cut_work(
    decisions: Decisions, shards: Shards, spec: Spec, kinds: Collection[str], *, ends: bool = False
) -> CutWork:
    """Decisions of any pp. ``kinds``: of recompute (none, full, selective) that the work is to know about. ``ends``: as
    CutWork has it."""
    lowered = Lowered(decisions, shards, decide_regions(spec.cuda_graphs, decisions, shards))
    builder = Builder(lowered, spec, ends=ends)
    builder.add({kind: () if kind == NONE else decide_recompute(kind, lowered) for kind in kinds})
    return builder.work(tuple(kinds))


def planned_work(lowered: Lowered, spec: Spec, recomputed: Sequence[Piece]) -> CutWork:
    """Of a plan that is decided: only its own kind, and no memory, since a plan has rows for that."""
    of_stages = lowered.decisions.stages.blocks_of_stage
    builder = Builder(lowered, spec, ends=len(of_stages) > 1 and not all(of_stages))
    builder.add({AS_PLANNED: recomputed}, with_memory=False)
    return builder.work((AS_PLANNED,))
