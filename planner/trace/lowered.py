"""The lowered stages of a plan on rank 0 of every axis but pp, and the trace of each: made once, read by all."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from passes.base import LowerContext, Pass, StageGraph
from passes.gather_weights import Visit, visits_of
from passes.lower import LOCAL, extract, with_head
from passes.ops.axis import AxisHandle
from passes.ops.counts import GlobalSums
from passes.ops.loss_head import SCORES
from passes.ops.random_state import RandomState
from passes.pieces import CompiledPiece, Piece, Region
from planner.decisions import Decisions
from planner.sharding.buffers import homes_of_ops
from planner.sharding.shards import Shards
from planner.trace.trace import StageTrace, trace_of


def context_at(
    decisions: Decisions, shards: Shards, place: Mapping[str, int], device: torch.device, **given: Any
) -> LowerContext:
    """Return the context of the passes for the rank at ``place`` on the axes; its handles are bound to no group.
    ``given``: other fields of the context.
    """
    mesh = decisions.mesh
    more = (*(("etp", "ep") if mesh.has_expert_axes else ()), *(("cp",) if mesh.cp > 1 else ()))
    handles = {a: AxisHandle(a, mesh.size(a), place[a]) for a in ("tp", mesh.data_axis, *more)}
    tp, data = handles.pop("tp"), handles.pop(mesh.data_axis)
    random, terms = RandomState(decisions.seed, tp.rank), decisions.terms
    given["sums"] = GlobalSums(data, terms.in_turn) if terms.in_turn > 1 else None
    lowering = replace(decisions.lowering, changes=shards.changes)
    return LowerContext(lowering, tp, random, device, place=place, data=data, axes=handles, **given)


@dataclass
class Lowered:
    """Owns the stages, traces and visits that were asked for. ``regions``: the parts of blocks that graphs capture;
    ``recomputed``: those that are freed and recomputed; ``pieces``: runs of ops that are compiled. ``passes``: those
    that make the program of one rank.
    """

    decisions: Decisions
    shards: Shards
    regions: tuple[Region, ...] = ()
    recomputed: tuple[Piece, ...] = ()
    pieces: tuple[CompiledPiece, ...] = ()
    passes: tuple[Pass, ...] = LOCAL
    _stages: dict[int, StageGraph] = field(default_factory=dict, repr=False)
    _traces: dict[int, StageTrace] = field(default_factory=dict, repr=False)
    _visits: dict[int, list[Visit]] = field(default_factory=dict, repr=False)

    def stage(self, index: int) -> StageGraph:
        """Return the program of a stage before any part of it is captured, compiled or recomputed. It can be read, and
        run on tensors without values.
        """
        if index not in self._stages:
            place, cpu = self.decisions.mesh.place(0), torch.device("cpu")
            context = context_at(self.decisions, self.shards, place, cpu, regions=self.regions)
            stage = self._stages[index] = extract(context, index)
            for step in self.passes:
                step.run(stage, context)
        return self._stages[index]

    def trace(self, index: int) -> StageTrace:
        """Return the trace of a stage; that of other ranks is as large."""
        if index not in self._traces:
            self._traces[index] = trace_of(self.decisions, self.shards, self.stage(index))
        return self._traces[index]

    def scoring_trace(self) -> StageTrace:
        """Trace the stage of the loss with scores of labels (planner.exchanges.collectives.check_scored)."""
        scored = Lowered(self.decisions, self.shards, self.regions, passes=with_head(LOCAL, SCORES))
        return scored.trace(self.num_stages - 1)

    def visits(self, index: int) -> list[Visit]:
        """Return visits of weights that ranks hold in shards, as the first rank of the stage reads them."""
        if index not in self._visits:
            decisions, mesh = self.decisions, self.decisions.mesh
            place, cpu = mesh.place(mesh.rank_of(pp=mesh.pp_rank_of(index))), torch.device("cpu")
            given = {"buckets": self.shards.bucket_of(place), "homes": homes_of_ops(decisions)}
            context = context_at(decisions, self.shards, place, cpu, **given)
            self._visits[index] = visits_of(self.stage(index), context)
        return self._visits[index]

    @property
    def num_stages(self) -> int:
        return self.decisions.stages.num_stages
