"""One position of a sequence at a time: whether a plan can compute it, and the values that its stages then exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

from torch import fx

from passes.errors import PlanError
from passes.partition.sequence.one_row import OneRow, one_row
from passes.program.ops.aten import shape_of
from passes.program.program import Program
from passes.program.stages import BoundaryPlan
from planner.decisions import Decisions

FIX = "nothing: every token runs the whole forward"


def one_row_of(decisions: Decisions) -> OneRow:
    """Raises PlanError, with the op and its line, if one position needs more than kept rows of earlier ones."""
    mesh = decisions.mesh
    if mesh.cp > 1:
        raise PlanError("the sequence is sharded over cp", where="mesh.cp", fix=FIX)
    if mesh.has_expert_axes:
        raise PlanError("rows of experts go to other ranks, over ep or etp", where="mesh.ep", fix=FIX)
    if decisions.lowering.documents.attentions:
        raise PlanError("attention is within documents", where="packing", fix=FIX)
    return one_row(decisions.program, decisions.scored)


def at_one_position(program: Program, rows: OneRow, borders: Iterable[BoundaryPlan]) -> tuple[BoundaryPlan, ...]:
    """The values that the logits need, of the shapes that one position has."""
    found = []
    for border in borders:
        node = program.node(border.name)
        if node not in rows.needed:
            continue
        shape, size = _at_one(rows, border.shape, node), prod(border.shape)
        found.append(replace(border, shape=shape, bytes=border.bytes * prod(shape) // size if size else 0))
    return tuple(found)


def _at_one(rows: OneRow, shape: tuple[int, ...], node: fx.Node) -> tuple[int, ...]:
    cut = rows.types.of(node)
    whole = shape_of(node)
    return tuple(whole[d] // rows.length if cut.is_sharded and d == cut.dim else n for d, n in enumerate(shape))
