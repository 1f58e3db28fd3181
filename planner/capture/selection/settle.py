"""The export as the planner can take it: all rows, and the same whatever was answered to questions about data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, fx

from passes.errors import PlanError, Where
from planner.capture.selection.dense import AllRows, is_dynamic, with_all_rows
from planner.capture.selection.questions import Questions
from planner.capture.selection.space import Keys
from planner.capture.selection.without_mask import is_same_without

TOLD = "selected rows are computed densely: all rows, with a mask on the result"
BRANCHED = "captured with its mask for every batch: without it, the result is the same where the mask selects nothing"
EMPTY_FIX = (
    "branches such as `if mask.any():` may skip only computation on the selected rows: with no row selected, the "
    "forward must give the same result without the branch"
)


def compute_all_rows(
    module: fx.GraphModule,
    asked: Questions,
    others: Iterable[tuple[Questions, fx.GraphModule]],
    constants: Mapping[str, Tensor],
) -> list[tuple[str, Where]]:
    """Rewrite ``module`` so that no shape depends on data; returns its notes for the user. ``others``: exports with
    other answers than ``asked`` got. ``constants``: by placeholder. Raises PlanError if rows that data selects are
    mixed, and if an answer changes more than the choice of written rows, or a mask that selects nothing there.
    """
    if not asked.asked and not is_dynamic(module):
        return []
    found, is_branched = with_all_rows(module), False
    for questions, other in others:
        if _are_same(with_all_rows(module, questions.empty), with_all_rows(other), questions.empty):
            continue
        is_branched = True
        if is_dynamic(module) or not is_same_without(module, other, questions.empty, constants):
            raise PlanError(
                "the model cannot be captured: its computation depends on whether any row is selected (data-dependent)",
                where=asked.asked[0],
                fix=EMPTY_FIX,
            )
    module.graph = found.graph
    module.delete_all_unused_submodules()
    module.recompile()
    return [*((TOLD, where) for where in found.told), *((BRANCHED, where) for where in asked.asked if is_branched)]


def skipped_parameters(
    module: fx.GraphModule, others: Iterable[tuple[Questions, fx.GraphModule]], fqn_of: Mapping[str, str]
) -> frozenset[str]:
    """Parameters that the forward reads, but not if no mask selects any row; before all rows are computed. Their
    gradient is then not needed: it is None in one process. ``fqn_of``: of each placeholder, the same for tied ones.
    """
    read = _read(module, fqn_of)
    return read.difference(*(_read(other, fqn_of) for _, other in others)) if others else frozenset()


def _read(module: fx.GraphModule, fqn_of: Mapping[str, str]) -> frozenset[str]:
    holders = module.graph.find_nodes(op="placeholder")
    return frozenset(fqn_of[node.name] for node in holders if node.users and node.name in fqn_of)


def _are_same(expected: AllRows, found: AllRows, empty: set[int]) -> bool:
    """Whether both compute the same, and the masks that were said to be empty are the same too."""
    masks = [{number: key for key, number in rows.asked.items() if number in empty} for rows in (expected, found)]
    return masks[0] == masks[1] and _outputs_key(expected.graph) == _outputs_key(found.graph)


def _outputs_key(graph: fx.Graph) -> str:
    """Equal for graphs that compute the same."""
    keys, found = Keys(), list[str]()
    fx.map_arg(graph.output_node().args, lambda n: found.append(keys(n)))
    return " ".join(found)
