"""Small rewrites of a finished stage graph that change speed, not values.

    linear(x, W) + b  → linear(x, W, b)         if no collective is between them
    mm(x, W) + b      → addmm(b, x, W)
    g(linear(x, W))   → summed in place
    cross_entropy(linear(x, W))   → its logits are overwritten, by the saved tensor and by its gradient

and placing: tensors that capture put on its own device go to the rank's.

Needs:   a localised graph.
Leaves:  no device but the rank's, and no op without readers.
"""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from passes.base import LowerContext, StageGraph
from passes.ops.collectives import g
from passes.ops.vocabulary import cross_entropy_in_place, vocabulary_cross_entropy, vocabulary_embedding
from passes.program.builder import prune
from passes.program.ops.aten import arguments, aten
from passes.program.ops.groups import RESHAPES, WITH_WEIGHT, Ops

OVERWRITTEN = WITH_WEIGHT | Ops("bmm")  # their backward does not read what they make
FUSED = {
    aten.linear.default: lambda x, w, b: (aten.linear.default, (x, w, b)),
    aten.mm.default: lambda x, w, b: (aten.addmm.default, (b, x, w)),
}


def fuse_bias(stage: StageGraph, context: LowerContext) -> None:
    """Give products back the bias that canonical form took off; the bias must be a vector of the product's last dim."""
    graph = stage.graph
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
            continue
        product, bias = node.args
        if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)):
            continue
        fused = FUSED.get(product.target)  # pyright: ignore[reportArgumentType]
        if fused is None:
            continue
        if len(product.users) != 1 or len(product.args) != 2 or not _is_bias(product, bias):
            continue
        target, args = fused(*product.args, bias)
        with graph.inserting_before(node):
            new = graph.call_function(target, args)
        new.meta = {**node.meta, "product": product.meta["origin"]}  # it saves the internal tensors of both
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(product)


def _is_bias(product: fx.Node, bias: fx.Node) -> bool:
    value, whole = bias.meta["val"], product.meta["val"]
    same = product.meta.get("placement").kind == "V" or bias.meta["placement"].kind != "V"  # pyright: ignore
    return (
        bias.op == "get_attr"
        and value.dim() == 1
        and value.shape[0] == whole.shape[-1]
        and same
        and value.dtype == whole.dtype
    )


def sum_in_place(stage: StageGraph, context: LowerContext) -> None:
    """A sum over ranks may overwrite a product that nothing else reads: its backward does not read it either."""
    for node in stage.graph.find_nodes(op="call_function", target=g):
        value: Any = node.args[0]
        if (value.target in OVERWRITTEN or value.target is vocabulary_embedding) and len(value.users) == 1:
            node.args = (*node.args, True)


def overwrite_logits(stage: StageGraph, context: LowerContext) -> None:
    """A loss takes the memory of a head's logits, which nothing else reads: their product does not either."""
    for node in stage.graph.find_nodes(op="call_function", target=vocabulary_cross_entropy):
        if loses_logits(node):
            node.kwargs = {**node.kwargs, "in_place": True}
    for node in stage.graph.find_nodes(op="call_function", target=aten.cross_entropy_loss.default):
        if loses_logits(node):
            given = arguments(node)
            node.args, node.kwargs = (given.pop("self"), given.pop("target")), given
            node.target = cross_entropy_in_place


def place_devices(stage: StageGraph, context: LowerContext) -> None:
    """Factories and casts of the captured graph name the device of capture; give them the rank's."""
    place(stage.graph, context.device)


def place(graph: fx.Graph, device: torch.device) -> None:
    """Every device that ``graph`` names becomes ``device``."""

    def placed(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
            node.args = map_aggregate(node.args, placed)
            node.kwargs = map_aggregate(node.kwargs, placed)


def drop_unread(stage: StageGraph, context: LowerContext) -> None:
    """Remove nodes without readers; arguments stay, as the runtime passes them by position."""
    prune(stage.graph)


def loses_logits(node: fx.Node) -> bool:
    """Return whether a cross-entropy may overwrite its logits: in no half precision, and if it is their only reader.

    The op that makes them must allocate them, and not read them in its backward. The target [n] are classes:
    probabilities of classes stay with torch.
    """
    logits, target = (*node.args, None, None)[:2]
    if not (isinstance(logits, fx.Node) and isinstance(target, fx.Node)):
        return False
    value = logits.meta["val"]
    if value.dim() != 2 or target.meta["val"].dim() != 1 or value.dtype not in (torch.float32, torch.float64):
        return False
    while logits.target in RESHAPES and len(logits.users) == 1 and isinstance(logits.args[0], fx.Node):
        logits = logits.args[0]
    if logits.target is aten.to.dtype:
        makes = logits.meta["val"].dtype != logits.all_input_nodes[0].meta["val"].dtype
    else:
        makes = logits.target in WITH_WEIGHT or logits.target is aten.add.Tensor
    return makes and len(logits.users) == 1
