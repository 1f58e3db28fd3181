"""The other ways to hold one parameter, each with the cost of the best plan around it: nothing of them is stored.

The problem of ``planner.placement.decide`` is solved once more for each style, with the parameter held (and with it its
copies in blocks of the same kind). An override of the parameter is left out: it says what is chosen, not what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from passes.errors import PlanError
from passes.partition.options.table import Option
from passes.types.types import Placement
from planner.placement.decide import Problem
from planner.placement.solve import Solution

REPLICATE, SHARDED = "replicate", ("column", "row", "vocab", "expert")


@dataclass(frozen=True)
class Alternative:
    """``cost``: in units of ``placement.solve.Weights``. ``compute``, ``weights``: FLOPs and bytes of matrices of a
    rank; ``exchanges``: the rest of the cost. ``why``: why there is none with this ``style``, if there is none.
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
