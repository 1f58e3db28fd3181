"""The parameters' rows: style, cut, the reason in words. Nothing is left out: frozen and unused ones are named so."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from passes.blocks.places import Places
from passes.parameters import axis_of
from planner.decisions import Decisions
from planner.sharding.parameters import ParameterPlan, part_of_node
from planner.spec.spec import Spec
from planner.tables.reasons import Reasons
from planner.updates.groups import base_of, settings_of


def parameter_rows(spec: Spec, decisions: Decisions, reasons: Reasons, places: Places) -> tuple[ParameterPlan, ...]:
    """One row for every parameter of the model, in the model's order."""
    aliases: dict[str, list[str]] = {}
    for alias, first in decisions.program.aliases.items():
        aliases.setdefault(first, []).append(alias)
    styles: dict[object, tuple[str, str]] = {}
    first_place = decisions.mesh.place(0)
    rows = []
    for name, fqn in decisions.program.parameters.items():
        node = decisions.program.node(name)
        part = part_of_node(decisions, node, first_place)
        # copies of a block have the reason of the first; parameters that blocks share have their own
        key = (decisions.blocks.representative.get(name, name), part)
        if key not in styles:
            styles[key] = reasons.style_and_reason(node)
        style, reason = styles[key]
        rows.append(
            ParameterPlan.of(
                part,
                name=fqn,
                shape=tuple(node.meta["val"].shape),
                dtype=str(node.meta["val"].dtype).removeprefix("torch."),
                style=style,
                reason=reason,
                stages=decisions.stages.parameter_stages.get(name, ()) or (0,),
                aliases=tuple(aliases.get(fqn, ())),
                origin=origin_of(spec, decisions, node),
                where=places.text(node) if node.users else "",
                matrices=decisions.rules.matrices.get(fqn),
            )
        )
    base, found = base_of(spec.optimizer), settings_of(spec.optimizer, rows)
    return tuple(replace(row, group=found[row.name].told(base)) if row.name in found else row for row in rows)


def origin_of(spec: Spec, decisions: Decisions, node: fx.Node) -> str:
    """The spec's line if an override decided it; "solver" if there was a choice; else "default"."""
    given = decisions.placements.origins[node.name]
    if given.startswith("override "):
        return str(spec.location(f"tensor_parallel.overrides.{given.removeprefix('override ')}"))
    axis = axis_of(decisions.expert_parts.get(node.name))
    return given if decisions.mesh.size(axis) > 1 and node.users else "default"
