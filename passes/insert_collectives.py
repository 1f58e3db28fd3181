"""Put a collective on every edge between different types: exactly those that the plan lists.

Needs:   a stage at global shapes (passes.extract).
Leaves:  ``meta["placement"]`` of every node, and every reader gets the type that it wants.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.graph import _register_custom_builtin

from passes.base import LowerContext, StageGraph
from passes.ops import collectives
from passes.ops.axis import AxisHandle
from passes.partition.type_changes import type_at
from passes.partition.writer import convert
from passes.types.types import Placement, Segment

# the generated code of the graph names a collective's cut, and must find these names
NAMES_IN_CODE: dict[str, tuple[str, type]] = {
    "Placement": ("from passes.types.types import Placement", Placement),
    "Segment": ("from passes.types.types import Segment", Segment),
}


def insert_collectives(stage: StageGraph, context: LowerContext) -> None:
    """One call for each change, right after its value, shared by all its readers."""
    lowering = context.lowering
    for name, node in stage.env.items():
        captured = lowering.program.node(name)
        node.meta["placement"] = type_at(lowering.placements, lowering.stages, captured, stage.index)
    changes = lowering.changes[stage.index]
    if not changes:
        return
    for name, (line, kind) in NAMES_IN_CODE.items():
        _register_custom_builtin(name, line, kind)
    output = stage.graph.output_node()
    for change in changes:
        if change.value not in stage.env:  # of an expert of another rank
            continue
        value = stage.env[change.value]
        handle = axis_node(stage, context.axis_of(value))
        cut = (
            (change.before if change.before.is_sharded else change.after,)
            if change.how.name in collectives.TAKES_CUT
            else ()
        )
        if change.how.name == "exchange":
            cut = (change.before, change.after)
        arguments: Any = (value, handle, *cut)
        readers = [stage.env[reader] for reader in change.readers if reader in stage.env]
        function = collectives.BY_NAME[change.how.name]
        call = convert(value, readers, lambda f=function, a=arguments: stage.graph.call_function(f, a))
        call.meta = {**value.meta, "placement": change.after, "change": change}
        for reader in ("send", "loss"):
            if reader in change.readers:
                _replace_output(output, change.value, call, reader)


def axis_node(stage: StageGraph, axis: AxisHandle) -> fx.Node:
    """The node that hands the axis to collectives; made once."""
    for node in stage.graph.nodes:
        if node.op == "get_attr" and node.target == axis.name:
            return node
    setattr(stage.root, axis.name, axis)
    with stage.graph.inserting_before(next(iter(stage.graph.nodes))):
        return stage.graph.create_node("get_attr", axis.name)


def _replace_output(output: fx.Node, name: str, call: fx.Node, reader: str) -> None:
    names, values = output.meta["names"], list(output.args[0])  # pyright: ignore
    is_loss = reader == "loss"
    for position, held in enumerate(names):
        last = position == len(names) - 1
        if held == name and (last if is_loss else True):
            values[position] = call
    output.args = (tuple(values),)
