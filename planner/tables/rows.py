"""Rows that only the plan has: its stages, diagnostics, and the shares that are cut.

The other rows are defined beside their decisions: parameters, collectives, boundaries and buffers in planner/sharding,
the schedule in planner/pipeline, memory in planner/cost, the mesh in planner/mesh.py. Plain ints, strings and tuples,
so that they save and compare; a row checks itself when it is made, by the planner or from a file. The JSON keys are the
field names.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.errors import require
from passes.program.stages import BoundaryPlan

LEVELS = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One (virtual) stage. ``num_parameters``: elements of its full parameters, before sharding over tp."""

    index: int
    pp_rank: int
    chunk: int
    blocks: tuple[str, ...]
    num_parameters: int
    receives: tuple[BoundaryPlan, ...] = ()
    sends: tuple[BoundaryPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something the user should know: ``what``, ``where`` (module and line), and how to ``fix`` it if possible."""

    level: str
    what: str
    where: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        require(self.level in LEVELS, f"a diagnostic has the unknown level {self.level}")


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares (0 to 1) of matrix-product FLOPs and of parameter elements that are cut over tp, and the element count."""

    flops_sharded_fraction: float = 0.0
    parameters_sharded_fraction: float = 0.0
    num_parameters: int = 0


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """One of several lengths: sequences and microbatches of its step, bytes on the fullest rank, and bytes that one
    rank of each stage exchanges in it. ``seconds``: as predicted, None without a cluster. ``decisions``: the hash of
    its own plan.
    """

    length: int
    sequences: int
    microbatches: int
    memory: int
    exchanged: int
    seconds: float | None
    decisions: str
