"""Products that gather an operand themselves, and save this rank's part of it, if the plan says so.

    gather_sequence(k), …, bmm(q, …)   →   of_gathered(bmm, [k], …)

Needs:   ops of this rank's sizes (passes.localize).
Leaves:  as many exchanges.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.ops.own_tokens import of_gathered
from passes.partition.sequence.facts import Exchange


def keep_own_tokens(stage: StageGraph, context: LowerContext) -> None:
    """One op for each reader, of all that it gathers."""
    found: dict[str, list[Exchange]] = {}
    for exchange in context.staged.sequence.exchanges:
        if exchange.reader in stage.env:
            found.setdefault(exchange.reader, []).append(exchange)
    for reader, exchanges in found.items():
        _fuse(stage, context, stage.env[reader], exchanges)


def _fuse(stage: StageGraph, context: LowerContext, reader: fx.Node, exchanges: list[Exchange]) -> None:
    ways = [[stage.env[name] for name in exchange.way] for exchange in exchanges]
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
