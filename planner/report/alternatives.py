"""``plan --why NAME``: what the sharding of one parameter costs in each style, as the solver weighs it."""

from __future__ import annotations

import difflib
from dataclasses import replace
from fnmatch import fnmatchcase

from passes.errors import PlanError
from planner.decisions import Decisions
from planner.placement.alternatives import Alternative, alternatives
from planner.placement.decide import posed
from planner.report.section import Section
from planner.spec.spec import Spec
from planner.tables.tables import Tables

COLUMNS = ("style", "cost", "compute", "weights", "exchanges", "reason")
NOTE = (
    "cost: the solver's, of the whole model with this parameter held (planner.placement.solve.Weights); compute and "
    "weights: FLOPs and bytes of matrices of a rank; these three over those of the cheapest. exchanges: the rest of "
    "the cost, in all-reduces of one value between blocks."
)
MOST = 8  # kinds of parameters that one glob shows


def why(tables: Tables, decisions: Decisions, name: str) -> list[Section]:
    """A table for each kind of parameter that ``name``, a dotted name or a glob, means. Raises PlanError."""
    program, rep = decisions.program, decisions.blocks.representative
    meant = [node for node, fqn in program.parameters.items() if fqn == name or fnmatchcase(fqn, name)]
    if not meant:
        near = difflib.get_close_matches(name, program.parameters.values(), n=1, cutoff=0)
        fix = f"did you mean {near[0]}?" if near else "the model has no parameters"
        raise PlanError(f"the model has no parameter {name}", where="--why", fix=fix)
    alike = {rep.get(node, node): node for node in reversed(meant)}
    sections = [_section(tables, decisions, node, first) for first, node in [*reversed(alike.items())][:MOST]]
    return [*sections[:-1], replace(sections[-1], note=NOTE)]


def _section(tables: Tables, decisions: Decisions, node: str, first: str) -> Section:
    asked = Spec.load({**tables.spec, "cluster": None}).tensor_parallel
    program, mesh = decisions.program, decisions.mesh
    fqn, row = program.parameters[node], next(p for p in tables.parameters if p.name == program.parameters[node])
    copies = sum(same == first for same in decisions.blocks.representative.values()) or 1
    title = f"{fqn} {list(row.shape)}, tp {mesh.tp}: {row.style}" + f", of {copies} alike" * (copies > 1)
    if mesh.tp == mesh.etp == 1 or not program.node(node).users:
        return Section(title, COLUMNS, ((row.style, "1.00", "1.00", "1.00", "0.00", row.reason),))
    problem = posed(
        program,
        decisions.blocks,
        mesh.tp,
        dict(asked.overrides),
        sequence_parallel=asked.sequence_parallel is True,
        vocabulary_multiple=asked.vocabulary_multiple,
        etp=mesh.etp,
        held={},
        freed=first,
    )
    chosen = decisions.placements.of(program.node(node))
    found = alternatives(problem, first)
    rows = [_row(each, found[0], f"chosen: {row.reason}" if each.placement == chosen else "") for each in found]
    return Section(title, COLUMNS, tuple(rows), right=frozenset(COLUMNS[1:-1]))


def _row(row: Alternative, best: Alternative, reason: str) -> tuple[str, ...]:
    if row.why:
        return row.style, "", "", "", "", f"not possible: {row.why}"
    of_best = ((row.cost, best.cost), (row.compute, best.compute), (row.weights, best.weights))
    ratios = [f"{ours / least:.2f}" if least else f"{1 + ours:.2f}" for ours, least in of_best]
    return row.style, *ratios, f"{row.exchanges:.2f}", reason
