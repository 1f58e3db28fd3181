"""Lower the expert exchange: its placeholders in the captured graph become calls on the axes' handles.

    meet(counts, n)            exchange of the counts of routed rows, once a layer              (passes.ops.meeting)
    dispatch, give_back        all-to-all over ep, and over etp to all holders of a part
    dispatch_tokens, combine   the same of tokens, each once to a rank                  (passes.ops.tokens)
    send_slots, return_slots   the same of parts of one size                             (passes.ops.slots)
    over_data                  an all-reduce over dp, and of the gradient               (passes.ops.collectives)
                               or, if a rank runs several microbatches, their sum       (passes.ops.global_sums)
    ends_of, ids_of, part      of the experts of this rank

Needs:   rows typed R before they are sent, P when they come back.
Leaves:  no call of passes.moe.exchange except the counting of choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.moe import exchange
from passes.moe.domain import domain_of, is_of_one
from passes.ops import meeting, slots
from passes.ops.axis import AxisHandle
from passes.ops.collectives import g_f
from passes.ops.global_sums import global_sum
from passes.program.ops.aten import aten
from passes.program.ops.over_data import over_data

ALONE = AxisHandle("alone", 1, 0)  # every rank has all experts, and all rows
BECOMES: dict[Any, Callable[..., Any]] = {
    exchange.meet: meeting.meet,
    exchange.dispatch: meeting.dispatch,
    exchange.give_back: meeting.give_back,
    exchange.dispatch_tokens: meeting.dispatch_tokens,
    exchange.combine: meeting.combine,
    exchange.ends_of: meeting.ends_of,
    exchange.ids_of: meeting.ids_of,
    exchange.grouped_mm: meeting.grouped_mm,
    exchange.part: meeting.part,
    exchange.join: meeting.join,
    exchange.share: meeting.share,
    exchange.own_slices: meeting.own_slices,
    exchange.send_slots: slots.send_slots,
    exchange.return_slots: slots.return_slots,
    exchange.slots_of: slots.slots_of,
}


def exchange_rows(stage: StageGraph, context: LowerContext) -> None:
    """In place: arguments stay, except for the handles that the exchange of counts needs."""
    for node in stage.graph.find_nodes(op="call_function", target=over_data):
        if context.sums is None:
            node.target, node.args = g_f, (node.args[0], axis_node(stage, context.data))
        else:
            site = f"{stage.index} {node.meta['origin']}"
            node.target, node.args = global_sum, (node.args[0], _handle(stage, "sums", context.sums), site)
    for node in list(stage.graph.nodes):
        if _is_part_of_stack(node):
            number = _number_here(context, node)
            node.args = (*node.args[:2], number, number + 1)
        if node.op == "call_function" and node.target in BECOMES:
            if node.target is exchange.meet:
                node.args, of_tokens = node.args[:2], node.args[2:]
                _hand_axes(stage, context, node)
                node.args = (*node.args, load_node(stage, context), _layer_of(context, node), *of_tokens)
            if node.target in (exchange.part, exchange.slots_of):
                node.update_arg(2, _number_here(context, node))
            if node.target is exchange.send_slots:
                node.args = (*node.args, *(None,)[len(node.args) - 3 :])
                _hand_axes(stage, context, node)
                node.args = (*node.args, load_node(stage, context), _layer_of(context, node))
            if node.target is exchange.own_slices:
                node.args = (*node.args, axis_node(stage, context.axes["ep"]))
            if node.target is exchange.return_slots:
                _hand_axes(stage, context, node)
                node.args = (*node.args, node.meta["val"].shape[node.args[2]])
            if node.target in exchange.OF_TOKENS:
                dtype = node.args[4:] if node.target is exchange.combine else ()
                node.args = (node.args[0], node.all_input_nodes[-1], *dtype)  # by then a row's token is known
            node.target = BECOMES[node.target]


def _is_part_of_stack(node: fx.Node) -> bool:
    """Whether a call takes the part of one expert from a stack of those of this rank."""
    if node.target is not aten.slice.Tensor or not is_of_one(node):
        return False
    stack = domain_of(node.all_input_nodes[0])
    return stack is not None and stack.experts == node.args[1]


def _number_here(context: LowerContext, node: fx.Node) -> int:
    """The number of an expert among those of this rank."""
    domain = domain_of(node)
    assert domain is not None
    return domain.number % (domain.num_experts // context.axes.get("ep", ALONE).size)


def _hand_axes(stage: StageGraph, context: LowerContext, node: fx.Node) -> None:
    own = (context.tp, context.axes["ep"], context.axes["etp"]) if "ep" in context.axes else (ALONE,) * 3
    handles = [axis_node(stage, axis) for axis in own]
    node.args = (*node.args, *handles)


def load_node(stage: StageGraph, context: LowerContext) -> fx.Node:
    """The node of the handle that counts rows."""
    return _handle(stage, "load", context.load)


def _handle(stage: StageGraph, name: str, handle: Any) -> fx.Node:
    """The node of a handle; made once."""
    for node in stage.graph.find_nodes(op="get_attr", target=name):
        return node
    setattr(stage.root, name, handle)
    with stage.graph.inserting_before(next(iter(stage.graph.nodes))):
        return stage.graph.create_node("get_attr", name)


def _layer_of(context: LowerContext, node: fx.Node) -> int:
    """The number of the layer of experts that exchanges counts, or sends slots: by its choices, or its calls."""
    origin, layers = context.lowering.program.node(node.meta["origin"]), context.lowering.experts.layers
    chosen = tuple(n.name for n in origin.all_input_nodes[0].all_input_nodes)
    return next(i for i, layer in enumerate(layers) if origin.name in layer.sent or layer.chosen == chosen)
