"""Products with parameters: those that read an f or a gather become one op with it, which exchanges while it computes
the weights' gradients; then all become ops that add these gradients to the runtime's buffers.

    f(x), linear(f, W), linear(f, V)          →   column_linears(x, [W, V])
    f(x), addmm(b, f, W)                      →   column_linears(x, [W], [b])
    gather(x), linear(gather, W)              →   gathered_linears(x, [W])     if the plan says so, saving a part

    linear(x, W), addmm(b, x, W), mm(x, W)    →   linear(x, W, b, .., weight_gradients)
    column_linears(…), gathered_linears(…)    →   the same, given the handle too
    grouped_mm(rows, W or Wᵀ, here)           →   grouped_linear(rows, W, here, .., weight_gradients)

In a region that a CUDA graph captures they add at once, since a replay cannot wait for a W. Products outside that read
its static memory do so too, since it holds another microbatch by then (planner.tables.build).

Needs:   biases given back to their products.
Leaves:  no product of a value with a real parameter that ATen computes.
"""

import operator
from collections import Counter
from typing import Any

from torch import fx, nn

from passes.base import LowerContext, StageGraph
from passes.moe.ties import is_grouped
from passes.ops.collectives import f, gather
from passes.ops.linear import column_linears, gathered_linears, linear
from passes.ops.meeting import ends_of, grouped_linear, grouped_mm
from passes.ops.recompute import MARKS
from passes.ops.region import run_region
from passes.ops.weight_gradients import AtOnce, WeightGradients
from passes.parts import region_of
from passes.pieces import homes, lies_in_a_graph, regions_on
from passes.program import walks
from passes.program.ops.aten import aten, has_floats, packet_of, tensors_of
from passes.program.ops.groups import VALUED, WITH_WEIGHT

PRODUCTS = (linear, column_linears, gathered_linears, grouped_linear)


def overlap_f(stage: StageGraph, context: LowerContext) -> None:
    """Fuse products with the f or the gather that they read, if no other op reads it: all of its gradient comes from
    them."""
    owner = regions_on(stage.index, context.regions)
    for node in [n for n in stage.graph.nodes if n.op == "call_function" and n.target in (f, gather)]:
        readers = list(node.users)
        if len({id(region_of(place, owner)) for place in (node, *readers)}) > 1:
            continue  # one op cannot be in two regions
        parts = [_held(reader, node) for reader in readers]
        if not readers or None in parts or len({reader.target is aten.linear.default for reader in readers}) > 1:
            continue
        weights, biases = zip(*parts, strict=True)  # pyright: ignore
        transposed = readers[0].target is not aten.linear.default
        with stage.graph.inserting_before(node):
            products = (transposed, list(weights), list(biases))
            if node.target is f:
                fused = stage.graph.call_function(column_linears, (*node.args, *products))
            else:
                is_asked = context.lowering.options.regather and node.meta["change"].axis == "tp"
                again = is_asked and any(weight.meta.get("grad") for weight in weights)  # these alone need the value
                fused = stage.graph.call_function(gathered_linears, (*node.args, again, *products))
            fused.meta = {**node.meta, "val": tuple(reader.meta["val"] for reader in readers)}
            for position, reader in enumerate(readers):
                result = stage.graph.call_function(operator.getitem, (fused, position))
                result.meta = dict(reader.meta)
                reader.replace_all_uses_with(result)
        for done in (*readers, node):
            stage.graph.erase_node(done)


def operands(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """Return (value, weight, bias or None) of a product of two matrices; None for anything else."""
    if node.op != "call_function" or node.target not in WITH_WEIGHT or node.kwargs:
        return None
    args: Any = node.args
    bias, value, weight = args if node.target is aten.addmm.default else (*(args[2:] or (None,)), *args[:2])
    return value, weight, bias


def _held(reader: fx.Node, x: fx.Node | None = None) -> tuple[Any, Any] | None:
    """Return (weight, bias) of a product of ``x``, or of any value, with a parameter of its own; None for anything
    else: a weight that is cast or sliced before stays with autograd."""
    value, *held = operands(reader) or (None, None, None)
    is_held = all(n is None or (isinstance(n, fx.Node) and n.op == "get_attr") for n in held)
    is_product = isinstance(value, fx.Node) and x in (value, None) and is_held
    return (held[0], held[1]) if is_product else None


def own_linears(stage: StageGraph, context: LowerContext) -> None:
    """Rewrite every product with a parameter."""
    owner, home = regions_on(stage.index, context.regions), homes(context.regions)
    for node in stage.graph.nodes:
        _regroup(node)
    found = [n for n in stage.graph.nodes if n.target in PRODUCTS or (_held(n) and not n.meta["val"].dtype.is_complex)]
    for node in found:
        at_once = region_of(node, owner) is not None or _reads_a_graph(node, stage, context, home)
        handle = AtOnce(context.weight_gradients) if at_once else context.weight_gradients
        if node.target not in PRODUCTS:
            node.args = (*(operands(node) or ()), node.target is not aten.linear.default)
            node.target = linear
        node.args = (*node.args, stage.handle(repr(handle), handle))


def _regroup(node: fx.Node) -> None:
    """A product of experts with a stack that is a parameter, unchanged or with each matrix transposed, with exchanged
    counts that give the rows of each expert.
    """
    if node.op != "call_function" or node.kwargs or not is_grouped(node):
        return
    rows, stack, here = node.all_input_nodes
    if here.target is ends_of:
        here = here.all_input_nodes[0]
    elif node.target is not grouped_mm:
        return
    # each of its matrices is transposed
    transposed = stack.target is aten.permute.default and list(stack.args[1]) in ([0, 2, 1], [0, -1, -2])  # pyright: ignore
    weight = stack.all_input_nodes[0] if transposed else stack
    if weight.op == "get_attr":
        node.target, node.args = grouped_linear, (rows, weight, here, transposed)


def _reads_a_graph(node: fx.Node, stage: StageGraph, context: LowerContext, home: frozenset[str]) -> bool:
    value: Any = node.args[0] if node.target in PRODUCTS else (operands(node) or (None,))[0]
    change = value.meta.get("change")
    name = value.meta.get("origin", "") if change is None else change.value
    if not home:
        return False
    lowering = context.lowering
    return lies_in_a_graph(lowering.program.node(name), stage.index, lowering.stages, lowering.sizes.pp_rank_of, home)


def contributions(module: nn.Module, graph: fx.Graph) -> Counter[str]:
    """Count for the attribute of each parameter how often a backward of the whole graph gives its gradient.

    Each product that knows places gives its own; all other readers together give theirs by autograd, once. A reader
    that no backward reaches, such as a product that is only compared with 0, gives none: a bucket would wait for it.
    """
    found, reached = Counter[str](), reached_by_backward(graph)
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, str(node.target), None), nn.Parameter):
            readers = [user for user in node.users if user in reached and user.target not in MARKS]
            reads = [read for user in readers for read in _reads(user, node, module)]
            found[str(node.target)] = sum(reads) + (0 if all(reads) else 1)
    return found


def reached_by_backward(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes from which a way leads to an output on which no op ends the gradient, themselves neither."""
    return set(
        walks.walk(graph.find_nodes(op="output"), walks.operands, into=lambda node: not _ends_the_gradient(node))
    )


def _ends_the_gradient(node: fx.Node) -> bool:
    """Return whether a call is a comparison, a position, a detached value or one of a shape alone. Unsure: False."""
    if node.op != "call_function":
        return False
    packet = packet_of(node.target)
    has_tensors = next(tensors_of(node), None) is not None
    return (has_tensors and not has_floats(node)) or packet is aten.detach or packet in VALUED


def _reads(user: fx.Node, value: fx.Node, module: nn.Module) -> list[bool]:
    """Return for each read of ``value`` by an op, in a region by each op of it, whether it is by a product of ours."""
    if user.target is run_region:
        return _reads_in_region(user, value, module)
    return [knows_places(user, module)] * _times(user, value)


def knows_places(call: fx.Node, module: nn.Module) -> bool:
    """Return whether a call is a product of ours, which gives the gradients of its weights without autograd."""
    last: Any = call.args[-1] if call.op == "call_function" and call.args else None
    handle = getattr(module, str(last.target), None) if isinstance(last, fx.Node) and last.op == "get_attr" else None
    return isinstance(handle, WeightGradients)


def _reads_in_region(user: fx.Node, value: fx.Node, module: nn.Module) -> list[bool]:
    args: Any = user.args
    call, given = getattr(module, args[0].target), [*args[1], *args[2]]
    inner = call.module.graph.find_nodes(op="placeholder")[given.index(value)]
    return [by for reader in inner.users for by in [reader.target in PRODUCTS] * _times(reader, inner)]


def _times(user: fx.Node, parameter: fx.Node) -> int:
    """Return how often an op reads a parameter."""
    listed = [v for arg in user.args for v in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    return max(1, sum(value is parameter for value in listed))
