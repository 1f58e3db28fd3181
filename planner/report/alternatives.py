"""``plan --why NAME``: the possible shardings of one parameter, each with the cost of the best plan around it.

The problem of ``planner.placement.decide`` is solved again for each style, with the parameter (and its copies in blocks
of the same kind) fixed to this style. An override of the parameter is left out, as it would exclude other styles.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from passes.errors import PlanError
from passes.partition.typings.table import Option
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.placement.candidates import Cutting
from planner.placement.decide import Problem, typing_problem
from planner.placement.solve import Solution
from planner.report.section import Section
from planner.spec.spec import Spec
from planner.tables.tables import Tables

COLUMNS = ("style", "cost", "compute", "weights", "exchanges", "reason")
NOTE = (
    "cost: the solver's, of the whole model with this parameter fixed to the style (planner.placement.solve.Weights); "
    "compute and weights: matrix FLOPs and matrix bytes of a rank; all three relative to the cheapest style. "
    "exchanges: the rest of the cost, in all-reduces of one value between blocks."
)
MOST = 8  # kinds of parameters that one glob shows

REPLICATE, SHARDED = "replicate", ("column", "row", "vocab", "expert")


@dataclass(frozen=True)
class Alternative:
    """One style of a parameter. ``cost``: in units of ``planner.placement.solve.Weights``. ``compute``, ``weights``:
    matrix FLOPs and bytes of a rank; ``exchanges``: the rest of the cost. ``why``: why the style is not possible.
    """

    style: str
    placement: Placement | None = None
    cost: float = 0.0
    compute: float = 0.0
    weights: float = 0.0
    exchanges: float = 0.0
    why: str = ""


def alternatives(problem: Problem, name: str) -> list[Alternative]:
    """Return the styles of the parameter with the representative ``name``: the cheapest first, impossible ones last.
    ``problem`` cannot be used afterwards."""
    node = next(node for node in problem.candidates.nodes if node.name == name)
    options, priced = problem.candidates.options, dict[str, Alternative]()
    for placement in dict.fromkeys(option.out for option in options[name]):
        style = next(problem.wishes.styles(node, placement), None) if placement.is_sharded else REPLICATE
        solution = None if style is None else _solved_with(problem, name, placement)
        if style is not None and solution is not None:
            row = _priced(problem, style, placement, solution)
            priced[style] = min(priced.get(style, row), row, key=lambda row: row.cost)
    left = [Alternative(style, why=problem.wishes.obstacle(node, style)) for style in SHARDED if style not in priced]
    return sorted(priced.values(), key=lambda row: row.cost) + left


def _solved_with(problem: Problem, name: str, placement: Placement) -> Solution | None:
    """Solve ``problem`` with this placement of ``name``; None if no typing of the rest fits."""
    options = problem.candidates.options
    all_of_it = options[name]
    options[name] = [option for option in all_of_it if option.out == placement]
    try:
        return problem.solve()
    except PlanError:
        return None
    finally:
        options[name] = all_of_it


def _priced(problem: Problem, style: str, placement: Placement, solution: Solution) -> Alternative:
    costs, weights = problem.costs, problem.weights
    compute, repeated = _of_rank(problem, solution.options, costs.flops)
    matrices, replicated = _of_rank(problem, solution.options, costs.matrix)
    exchanges = solution.cost - weights.flops * repeated - weights.parameters * replicated
    return Alternative(style, placement, solution.cost, compute, matrices, max(exchanges, 0.0))


def _of_rank(problem: Problem, chosen: Mapping[str, Option], sizes: Mapping[str, float]) -> tuple[float, float]:
    """Return the part of the model's ``sizes`` on one rank, and its excess over an equal share."""
    total = more = 0.0
    for node in problem.candidates.nodes:
        size, ranks = sizes.get(node.name, 0.0) * problem.costs.instances[node.name], problem.candidates.size(node)
        beyond = size * (1 - 1 / ranks) if chosen[node.name].whole else 0.0
        total, more = total + size / ranks + beyond, more + beyond
    return total, more


def why(tables: Tables, decisions: Decisions, name: str) -> list[Section]:
    """Return a table for each kind of parameter that matches ``name`` (or glob). Raises PlanError if none does."""
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
    problem = typing_problem(program, decisions.blocks, Cutting(mesh.tp, mesh.etp, **asked.typing()), freed=first)
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
