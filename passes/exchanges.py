"""Lower exchanges: their placeholders in the captured graph become calls on the axes' handles.

Of experts (choices of experts that may rest are counted too):

    meet(counts, n)            exchange of the counts of routed rows, once a layer              (passes.ops.meeting)
    dispatch, give_back        all-to-all over ep, and over etp to all holders of a part
    dispatch_tokens, combine   the same of tokens, each once to a rank                  (passes.ops.tokens)
    send_slots, return_slots   the same of parts of one size                             (passes.ops.slots)
    over_data                  an all-reduce over dp, and of the gradient               (passes.ops.collectives)
                               or, if a rank runs several microbatches, their sum       (passes.ops.counts)
    ends_of, ids_of, part      of the experts of this rank

Along the sequence, over cp:

    local_rows                 this rank's chunks of a full value                       (passes.ops.context)
    gather_sequence            all-gather, backward reduce-scatter                      (passes.ops.context)
    sum_over_ranks             all-reduce both ways                                     (passes.ops.collectives)
    causal_attention           of this rank's rows to the keys before them, by chunks   (passes.ops.attention)
    gathered_attention         of this rank's rows, to keys that it gathers itself      (passes.ops.gathered_attention)

Products gather an operand themselves, and save this rank's part of it for the backward, which gathers it again: a saved
operand of all tokens would be equally large for every cp. (Attention does so too: passes.partition.sequence.own_keys.)

    gather_sequence(k), …, bmm(q, …)   →   of_gathered(bmm, [k], …)

Needs:   rows typed R before they are sent, P when they come back; a program over one cp rank's tokens.
Leaves:  no call of passes.moe.exchange except the counting of choices, nor of passes.program.ops.sequence.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from passes.base import LowerContext, StageGraph
from passes.moe import exchange
from passes.ops import meeting, slots
from passes.ops.attention import causal_attention
from passes.ops.axis import ALONE
from passes.ops.collectives import g_f
from passes.ops.context import gather_sequence, local_rows
from passes.ops.counts import global_sum
from passes.ops.counts import note_choices as noted
from passes.ops.flash import FLASH
from passes.ops.gathered_attention import gathered_attention, of_gathered
from passes.partition.type_changes import Placements
from passes.partition.typings.base import Form
from passes.program.ops import sequence
from passes.program.ops.aten import aten, is_random, shape_of
from passes.program.ops.groups import VIEWS
from passes.program.ops.sequence import over_data

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
    exchange.own_slices: meeting.own_slices,
    exchange.send_slots: slots.send_slots,
    exchange.return_slots: slots.return_slots,
}
OVER_CP: dict[Any, tuple[Callable[..., Any], int]] = {  # and the argument position of the number of ranks
    sequence.local_rows: (local_rows, 2),
    sequence.gather_sequence: (gather_sequence, 2),
    sequence.sum_over_ranks: (g_f, 1),
    sequence.causal_attention: (causal_attention, 3),
    sequence.gathered_attention: (gathered_attention, 4),
}
ATTENTIONS = (causal_attention, gathered_attention)
OPTIONS = ("dropout_p", "scale", "enable_gqa")
SAME_OP = {Form.WHOLE, Form.PARTS, Form.COLUMN, Form.ROW}
Way = list[fx.Node]  # a gather, and the calls after it that only rearrange its value


def exchange_rows(stage: StageGraph, context: LowerContext) -> None:
    """Rewrite exchanges in place: arguments stay, except for the handles that the exchange of counts needs."""
    for node in stage.graph.find_nodes(op="call_function", target=over_data):
        if context.sums is None:
            node.target, node.args = g_f, (node.args[0], stage.axis(context.data))
        else:
            site = f"{stage.index} {node.meta['origin']}"
            node.target, node.args = global_sum, (node.args[0], stage.handle("sums", context.sums), site)
    for node in list(stage.graph.nodes):
        if node.op == "call_function" and node.target in BECOMES:
            node.args = _with_handles(stage, context, node)
            node.target = BECOMES[node.target]


def _with_handles(stage: StageGraph, context: LowerContext, node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of an exchange of rows or slots, with the axes and the figures that it needs."""
    target, args = node.target, node.args
    if target is exchange.own_slices:
        return (*args, stage.axis(context.axes["ep"]))
    if target in exchange.OF_TOKENS:  # by then a row's token is known
        return (args[0], node.all_input_nodes[-1], *(args[4:] if target is exchange.combine else ()))
    if target not in (exchange.meet, *exchange.OF_SLOTS):
        return args
    own = (context.tp, context.axes["ep"], context.axes["etp"]) if "ep" in context.axes else (ALONE,) * 3
    axes = [stage.axis(axis) for axis in own]
    if target is exchange.return_slots:
        return (*args, *axes, node.meta["val"].shape[args[2]])  # pyright: ignore
    figures = stage.handle("load", context.load), _layer_of(context, node)
    if target is exchange.meet:
        return (*args[:2], *axes, *figures, *args[2:])
    return (*args, *(None,)[len(args) - 3 :], *axes, *figures)


def _layer_of(context: LowerContext, node: fx.Node) -> int:
    """Return the number of the layer of experts that exchanges counts, or sends slots: by its choices, or its calls."""
    origin, layers = context.lowering.program.node(node.meta["origin"]), context.lowering.experts.layers
    chosen = tuple(n.name for n in origin.all_input_nodes[0].all_input_nodes)
    return next(i for i, layer in enumerate(layers) if origin.name in layer.sent or layer.chosen == chosen)


def exchange_sequence(stage: StageGraph, context: LowerContext) -> None:
    """Put the axis in the place of its size; options of attention become keywords, its kernel among them."""
    for node in list(stage.graph.nodes):
        if node.op == "call_function" and node.target in OVER_CP:
            (function, position), draws = OVER_CP[node.target], is_random(node)
            node.update_arg(position, stage.axis(context.axes["cp"]))
            node.target = function
            if function is causal_attention:
                node.kwargs = dict(zip(OPTIONS, node.args[position + 1 :], strict=False)) | node.kwargs
                node.args = node.args[: position + 1]
            if function in ATTENTIONS and not draws and context.lowering.options.attention != FLASH:
                node.kwargs = {**node.kwargs, "kernel": context.lowering.options.attention}


def note_choices(stage: StageGraph, context: LowerContext) -> None:
    starts = {name: asked.start for asked in context.lowering.asked for name in asked.chosen}
    for node in list(stage.graph.nodes):
        origin = node.meta.get("origin")
        # not one that a pass inserted
        if origin in starts and node.target == context.lowering.program.node(origin).target:
            load = stage.handle("load", context.load)
            with stage.graph.inserting_after(node):
                call = stage.graph.call_function(noted, (load, node, starts[origin]))
            call.meta.update(node.meta)


def keep_own_tokens(stage: StageGraph, context: LowerContext) -> None:
    """Write one op for each reader, of all that it gathers."""
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
    """Return whether one product reads the value, as one operand, unchanged: with equal batch dims these two save their
    operands as they are."""
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
    axis = stage.axis(context.axes["cp"])
    given: Any = (axis, reader.target, list(owns), list(dims), steps, args)
    with stage.graph.inserting_before(reader):
        made = stage.graph.call_function(of_gathered, given)
    made.meta = dict(reader.meta)
    reader.replace_all_uses_with(made)
    for node in (reader, *(n for way in ways for n in reversed(way))):
        stage.graph.erase_node(node)
        stage.env.pop(node.meta["origin"], None)
    stage.env[made.meta["origin"]] = made
