"""``plan --why NAME``: the other ways to hold one parameter, each with the cost of the best plan around it.

Nothing of them is stored: the problem of ``planner.placement.decide`` is solved once more for each style, with the
parameter held (and with it its copies in blocks of the same kind). An override of the parameter is left out: it says
what is chosen, not what it costs.
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
    "cost: the solver's, of the whole model with this parameter held (planner.placement.solve.Weights); compute and "
    "weights: FLOPs and bytes of matrices of a rank; these three over those of the cheapest. exchanges: the rest of "
    "the cost, in all-reduces of one value between blocks."
)
MOST = 8  # kinds of parameters that one glob shows

REPLICATE, SHARDED = "replicate", ("column", "row", "vocab", "expert")


@dataclass(frozen=True)
class Alternative:
    """``cost``: in units of ``planner.placement.solve.Weights``. ``compute``, ``weights``: FLOPs and bytes of matrices
    of a rank; ``exchanges``: the rest of the cost. ``why``: why there is none with this ``style``, if there is none.
    """

    style: str
    placement: Placement | None = None
    cost: float = 0.0
    compute: float = 0.0
    weights: float = 0.0
    exchanges: float = 0.0
    why: str = ""


def alternatives(problem: Problem, name: str) -> list[Alternative]:
    """Of the parameter with the representative ``name``: the cheapest first, then what is not possible. ``problem`` is
    used up."""
    node = next(node for node in problem.candidates.nodes if node.name == name)
    options, found = problem.candidates.options, dict[str, Alternative]()
    for placement in dict.fromkeys(option.out for option in options[name]):
        style = next(problem.wishes.styles(node, placement), None) if placement.is_sharded else REPLICATE
        held = None if style is None else _with_held(problem, name, placement)
        if style is not None and held is not None:
            made = _priced(problem, style, placement, held)
            found[style] = min(found.get(style, made), made, key=lambda row: row.cost)
    left = [Alternative(style, why=problem.wishes.obstacle(node, style)) for style in SHARDED if style not in found]
    return sorted(found.values(), key=lambda row: row.cost) + left


def _with_held(problem: Problem, name: str, placement: Placement) -> Solution | None:
    """None if no typing of the rest fits."""
    options = problem.candidates.options
    all_of_it = options[name]
    options[name] = [option for option in all_of_it if option.out == placement]
    try:
        return problem.solve()
    except PlanError:
        return None
    finally:
        options[name] = all_of_it


def _priced(problem: Problem, style: str, placement: Placement, found: Solution) -> Alternative:
    costs, weights = problem.costs, problem.weights
    compute, repeated = _of_rank(problem, found.options, costs.flops)
    matrices, held = _of_rank(problem, found.options, costs.matrix)
    exchanges = found.cost - weights.flops * repeated - weights.parameters * held
    return Alternative(style, placement, found.cost, compute, matrices, max(exchanges, 0.0))


def _of_rank(problem: Problem, chosen: Mapping[str, Option], sizes: Mapping[str, float]) -> tuple[float, float]:
    """What a rank has of the model's ``sizes``, and how much more that is than its share."""
    total = more = 0.0
    for node in problem.candidates.nodes:
        size, ranks = sizes.get(node.name, 0.0) * problem.costs.instances[node.name], problem.candidates.size(node)
        beyond = size * (1 - 1 / ranks) if chosen[node.name].whole else 0.0
        total, more = total + size / ranks + beyond, more + beyond
    return total, more


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
