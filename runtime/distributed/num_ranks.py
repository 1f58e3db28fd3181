"""How many processes a command starts: as many as the mesh takes."""

from __future__ import annotations

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec


def num_ranks_of(plan: Plan, spec: Spec, asked: int | None) -> int:
    """The world size of the plan. ``asked``: by --nproc, if given. Raises PlanError if that is another number."""
    world_size = plan.mesh.world_size
    if asked not in (None, world_size):
        raise PlanError(
            f"--nproc {asked}, but the mesh needs {world_size} processes",
            where=spec.location("mesh"),
            fix=f"use --nproc {world_size}, or change the mesh",
        )
    return world_size
