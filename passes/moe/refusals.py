"""Why a layer of experts cannot be distributed: the errors of all openings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from torch import fx

from passes.errors import PlanError
from passes.moe.layers import ExpertLayer
from passes.program.ops.aten import aten, is_random
from passes.program.source_lines import where_of

NAMED = "set dropout: layout_invariant for experts in a loop; or "  # its numbers then follow their tokens
Refusal = Callable[[fx.Node, str], PlanError]


def refusal_of(layer: ExpertLayer, fix: str) -> Refusal:
    """The error for a call that is not understood, by its reason."""
    return partial(_refused, layer.num_experts, fix)


def _refused(num_experts: int, fix: str, node: fx.Node, why: str) -> PlanError:
    what = f"these {num_experts} experts cannot be distributed over ep: {why}"
    return PlanError(what, where=where_of(node), fix=f"{fix}, or set mesh.ep: 1")


def check_draws(calls: Iterable[fx.Node], held: str, refusal: Refusal) -> None:
    """Raise if one of the calls on ``held``, rows or slots, draws random numbers."""
    for node in sorted(calls):
        if is_random(node):
            error = refusal(node, f"dropout inside experts draws for {held} that other ranks hold")
            named = "" if "draw" in node.meta or node.target is not aten.dropout.default else NAMED
            raise PlanError(error.what, where=error.where, fix=f"{named}{error.fix}")
