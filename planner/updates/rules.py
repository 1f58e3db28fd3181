"""The update rule of each parameter, and the matrices of a weight that a rule of matrices updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.program.matrices import Matrices, find_matrices
from passes.program.program import Program
from planner.spec.optimizer import OptimizerSpec
from planner.spec.update_rules import MATRIX_RULES
from planner.updates.groups import settings_of


@dataclass(frozen=True)
class UpdateRules:
    """``section``: the rule of the spec's section; ``others``: of the parameters with another one, by fqn.

    ``matrices``: of each hidden weight, by fqn; empty if no rule of the run asks for matrices.
    """

    section: str = "adamw"
    others: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Matrices] = field(default_factory=dict)

    def of(self, fqn: str) -> str:
        return self.others.get(fqn, self.section)

    def matrices_of(self, fqn: str) -> Matrices | None:
        """None if it is updated element by element."""
        return self.matrices.get(fqn) if self.of(fqn) in MATRIX_RULES else None


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    matrices: Matrices | None


def decide_rules(optimizer: OptimizerSpec, program: Program) -> UpdateRules:
    """Raises PlanError for groups that contradict each other, name nothing, or ask for matrices of a vector."""
    asked = {optimizer.name, *(group.name for group in optimizer.groups.values())}
    by_heads = optimizer.split == "heads"
    matrices = {}
    if asked & MATRIX_RULES:
        matrices = find_matrices(program.graph.graph, program.parameters, by_heads=by_heads)
    aliases: dict[str, list[str]] = {}
    for alias, first in program.aliases.items():
        aliases.setdefault(first, []).append(alias)
    rows = [
        _Row(fqn, tuple(program.node(name).meta["val"].shape), tuple(aliases.get(fqn, ())), matrices.get(fqn))
        for name, fqn in program.parameters.items()
    ]
    found = settings_of(optimizer, rows)
    others = {name: settings.rule for name, settings in found.items() if settings.rule != optimizer.name}
    return UpdateRules(optimizer.name, others, matrices)
