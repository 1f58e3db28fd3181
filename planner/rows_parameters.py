"""The parameters' rows: style, cut and the reason in words."""

from __future__ import annotations

import operator

from torch import fx

from planner.plan_rows import ParameterPlan
from planner.rules.contraction import SEE_THROUGH
from planner.source import PlanSource
from planner.source_lines import where_of
from planner.types import Placement


def parameter_rows(source: PlanSource) -> tuple[ParameterPlan, ...]:
    """One row for every parameter of the model, in the model's order."""
    aliases: dict[str, list[str]] = {}
    for alias, first in source.program.aliases.items():
        aliases.setdefault(first, []).append(alias)
    rows = []
    for name, fqn in source.program.parameters.items():
        node = source.program.node(name)
        placement = source.placements.of(node)
        style, reason = style_of(source, node, placement)
        reader = next(iter(node.users), None)
        rows.append(ParameterPlan.of(
            placement, source.mesh.tp, name=fqn, shape=tuple(node.meta["val"].shape),
            dtype=str(node.meta["val"].dtype).removeprefix("torch."), style=style, reason=reason,
            stages=source.stages.parameter_stages.get(name, ()) or (0,), aliases=tuple(aliases.get(fqn, ())),
            origin=source.placements.origins[name], where=str(where_of(reader)) if reader is not None else ""))
    return tuple(rows)


def style_of(source: PlanSource, node: fx.Node, placement: Placement) -> tuple[str, str]:
    """(style, reason) of a parameter, from how its readers use it."""
    if not node.users:
        return "replicate", "does not reach the loss"
    if source.mesh.tp == 1:
        return "replicate", "tp = 1"
    readers = list(_readers(node))
    rules = {source.placements.options[r.name].rule for r in readers}
    if not placement.is_sharded:
        return "replicate", _why_whole(source, node, readers, placement)
    if "vocabulary" in rules or placement.padding:
        padded = f", {placement.padding} rows of padding" if placement.padding else ""
        return "vocab", f"rows cut over the vocabulary{padded}"
    if "row" in rules:
        return "row", "cut along the features it sums over; the partial results are added by g"
    return "column", "cut along the features it makes, as its readers need them"


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops that use a parameter, seen through reshapes and the like."""
    found = []
    for user in node.users:
        found += _readers(user) if user.target in SEE_THROUGH or user.target is operator.getitem else [user]
    return found


def _why_whole(source: PlanSource, node: fx.Node, readers: list[fx.Node], placement: Placement) -> str:
    if source.placements.origins[node.name].startswith("override"):
        return "as the spec asks"
    partial = "; gradients are summed over tp once a step" if placement.kind == "R" else ""
    if len(node.meta["val"].shape) < 2:
        return "a vector outside the parallel regions: every rank holds it" + partial
    return "cutting it would need more collectives than it saves" + partial
