"""The lowered stages of a plan on rank 0 of every axis but pp, and the trace of each: made once, read by all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from passes.base import StageGraph
from passes.regions import Region
from planner.decisions import Decisions
from planner.saved.trace import StageTrace, trace_of
from planner.sharding.shards import Shards
from planner.staged import local_stage


@dataclass
class Lowered:
    """Owns the stages and traces that were asked for. ``regions``: the parts of blocks that graphs capture."""

    decisions: Decisions
    shards: Shards
    regions: Sequence[Region] = ()
    _stages: dict[int, StageGraph] = field(default_factory=dict, repr=False)
    _traces: dict[int, StageTrace] = field(default_factory=dict, repr=False)

    def stage(self, index: int) -> StageGraph:
        if index not in self._stages:
            self._stages[index] = local_stage(self.decisions, self.shards, index, self.regions)
        return self._stages[index]

    def trace(self, index: int) -> StageTrace:
        """On the other ranks it is as large."""
        if index not in self._traces:
            self._traces[index] = trace_of(self.decisions, self.shards, self.stage(index))
        return self._traces[index]

    @property
    def num_stages(self) -> int:
        return self.decisions.stages.num_stages
