"""All that a rank holds, sums and exchanges, in one value: the plan carries it, passes and runtime read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from passes.partition.type_changes import TypeChange, check_experts_alike, type_changes
from passes.program.stages import BoundaryPlan
from passes.types.collectives import CollectivePlan
from planner.decisions import Decisions
from planner.sharding.boundaries import boundary
from planner.sharding.buffers import Buffer, buffers_at, buffers_of
from planner.sharding.collectives import step_collectives, sums_of_the_loss
from planner.sharding.residency import Unit
from planner.spec.spec import Spec


@dataclass(frozen=True)
class Shards:
    """By stage its ``changes`` of type and the ``boundaries`` it sends on; ``buffers`` and ``at_step`` by pp rank.

    ``buffers`` are those of ep rank 0; ``elsewhere`` lays out those of another (pp rank, ep rank), if parameters belong
    to one expert alone, so that each ep rank holds others. ``reshards``: weights that ranks hold in shards are freed
    after each use, but for those ``kept``, by pp rank.
    """

    changes: tuple[tuple[TypeChange, ...], ...]
    boundaries: tuple[tuple[BoundaryPlan, ...], ...]
    buffers: tuple[Buffer, ...]
    at_step: tuple[CollectivePlan, ...]
    elsewhere: Callable[[int, int], tuple[Buffer, ...]] | None = None
    reshards: bool = True
    kept: tuple[frozenset[Unit], ...] = ()

    def kept_by(self, pp_rank: int) -> frozenset[Unit]:
        """The units that stay whole from their first use in a step to its end, though others are freed."""
        return self.kept[pp_rank] if self.kept else frozenset()

    def received(self, stage: int) -> tuple[BoundaryPlan, ...]:
        return self.boundaries[stage - 1] if stage else ()

    def sent(self, stage: int) -> tuple[BoundaryPlan, ...]:
        return self.boundaries[stage]

    def buffers_of_rank(self, pp_rank: int, ep_rank: int = 0) -> tuple[Buffer, ...]:
        if ep_rank and self.elsewhere is not None:
            return self.elsewhere(pp_rank, ep_rank)
        return tuple(buffer for buffer in self.buffers if buffer.pp_rank == pp_rank)

    def bucket_of(self, place: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Of each parameter that other ranks update: its buffer on the rank at ``place``, and the bucket in it."""
        return {
            slot.name: (number, slot.bucket)
            for number, buffer in enumerate(self.buffers_of_rank(place["pp"], place["ep"]))
            for slot in buffer.layout.slots
            if buffer.layout.num_ranks > 1
        }

    def buffer_of(self, ep: int) -> dict[str, Buffer]:
        """Of every trainable parameter, on whichever rank it lies."""
        ep_ranks = range(1 if self.elsewhere is None else ep)
        pp_ranks = sorted({buffer.pp_rank for buffer in self.buffers})
        found = [buffer for pp in pp_ranks for rank in ep_ranks for buffer in self.buffers_of_rank(pp, rank)]
        return {name: buffer for buffer in found if not buffer.is_frozen for name in buffer.by_name}


def decide_shards(spec: Spec, decisions: Decisions) -> Shards:
    """From the typed, cut graph: every stage's changes of type and boundary, every rank's buffers and their sums.

    Raises PlanError if ranks would exchange different things for their experts.
    """
    program, stages = decisions.program, decisions.stages
    buffers, zero = buffers_of(spec, decisions), spec.optimizer.planned_zero
    changes = tuple(type_changes(decisions.placements, stages, program, index) for index in range(stages.num_stages))
    check_experts_alike(changes, program, decisions.mesh)
    are_alone = any(part.dim < 0 for part in decisions.expert_parts.values())
    return Shards(
        changes,
        tuple(boundary(decisions, index) for index in range(stages.num_stages)),
        buffers,
        (
            *sums_of_the_loss(decisions),
            *step_collectives(decisions.mesh, buffers, zero, decisions.num_noted, decisions.rules),
        ),
        partial(buffers_at, spec, decisions) if are_alone else None,
        spec.optimizer.reshard is not False,
    )
