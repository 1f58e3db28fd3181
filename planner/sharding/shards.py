"""All that a rank holds, sums and exchanges, in one value: the plan carries it, passes and runtime read it."""

from __future__ import annotations

from dataclasses import dataclass

from planner.decisions import Decisions
from planner.sharding.boundaries import BoundaryPlan, boundary
from planner.sharding.buffers import Buffer, buffers_of
from planner.sharding.collectives import CollectivePlan, step_collectives
from planner.sharding.type_changes import TypeChange, type_changes
from planner.spec.spec import Spec


@dataclass(frozen=True)
class Shards:
    """By stage its ``changes`` of type and the ``boundaries`` it sends on; ``buffers`` and ``at_step`` by pp rank."""

    changes: tuple[tuple[TypeChange, ...], ...]
    boundaries: tuple[tuple[BoundaryPlan, ...], ...]
    buffers: tuple[Buffer, ...]
    at_step: tuple[CollectivePlan, ...]

    def received(self, stage: int) -> tuple[BoundaryPlan, ...]:
        return self.boundaries[stage - 1] if stage else ()

    def sent(self, stage: int) -> tuple[BoundaryPlan, ...]:
        return self.boundaries[stage]

    def buffers_of_rank(self, pp_rank: int) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in self.buffers if buffer.pp_rank == pp_rank)


def decide_shards(spec: Spec, decisions: Decisions) -> Shards:
    """From the typed, cut graph: every stage's changes of type and boundary, every rank's buffers and their sums."""
    program, stages = decisions.program, decisions.stages
    buffers = buffers_of(spec, decisions)
    return Shards(
        tuple(type_changes(decisions.placements, stages, program, index) for index in range(stages.num_stages)),
        tuple(boundary(decisions, index) for index in range(stages.num_stages)),
        buffers,
        step_collectives(decisions.mesh, buffers, spec.optimizer.zero),
    )
