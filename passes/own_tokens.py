"""Products that gather an operand themselves, and save this rank's part of it for the backward, which gathers it again.

    gather_sequence(k), …, bmm(q, …)   →   of_gathered(bmm, [k], …)

A saved k of all tokens would be equally large for every cp. Attention gathers its own keys and values
(passes.partition.sequence.own_keys).

Needs:   ops of this rank's sizes (passes.localize).
Leaves:  as many exchanges.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops.context import gather_sequence
from passes.ops.own_tokens import of_gathered
from passes.partition.options.forms import Form
from passes.partition.placements import Placements
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.groups import VIEWS

SAME_OP = {Form.WHOLE, Form.PARTS, Form.COLUMN, Form.ROW}
Way = list[fx.Node]  # a gather, and the calls after it that only rearrange its value


def keep_own_tokens(stage: StageGraph, context: LowerContext) -> None:
    """One op for each reader, of all that it gathers."""
    found: dict[fx.Node, list[Way]] = {}
    is_asked = context.lowering.options.own_tokens
    gathers = stage.graph.find_nodes(op="call_function", target=gather_sequence) if is_asked else ()
    for node in gathers:
        way = _way(node) if node.meta["grad"] else []
        reader = next(iter(way[-1].users)) if way and len(way[-1].users) == 1 else None
        if reader is not None and _reads_once(reader, way[-1], context.lowering.placements):
            found.setdefault(reader, []).append(way)
    for reader, ways in found.items():
        _fuse(stage, context, reader, ways)


def _way(node: fx.Node) -> Way:
    way = [node]
    while len(way[-1].users) == 1:
        (reader,) = way[-1].users
        if reader.target not in VIEWS:
            break
        way.append(reader)
    return way


def _reads_once(reader: fx.Node, value: fx.Node, placements: Placements) -> bool:
    """Whether one product reads the value, as one operand, unchanged: with equal batch dims these two save their
    operands as they are.
    """
    is_product = reader.target in (aten.matmul.default, aten.bmm.default)
    if not is_product or not reader.meta["grad"] or len(reader.all_input_nodes) < 2:
        return False
    left, right = (shape_of(n)[:-2] for n in reader.all_input_nodes)
    is_kept = all(n.meta["grad"] for n in reader.all_input_nodes) and left == right != ()
    return is_kept and value in reader.args and placements.options[reader.meta["origin"]].form in SAME_OP


def _fuse(stage: StageGraph, context: LowerContext, reader: fx.Node, ways: list[Way]) -> None:
    places: dict[Any, Any] = {way[-1]: ("gathered", number) for number, way in enumerate(ways)}
    owns, dims = zip(*(way[0].args[:2] for way in ways), strict=True)
    steps = [[(step.target, list(step.args[1:])) for step in way[1:]] for way in ways]
    args: Any = fx.map_arg(list(reader.args), lambda n: places.get(n, n))
    axis = axis_node(stage, context.axes["cp"])
    given: Any = (axis, reader.target, list(owns), list(dims), steps, args)
    with stage.graph.inserting_before(reader):
        made = stage.graph.call_function(of_gathered, given)
    made.meta = dict(reader.meta)
    reader.replace_all_uses_with(made)
    for node in (reader, *(n for way in ways for n in reversed(way))):
        stage.graph.erase_node(node)
        stage.env.pop(node.meta["origin"], None)
    stage.env[made.meta["origin"]] = made
