"""The capturable parts of a block with an expert layer: the ops before the experts, or the whole layer.

    moe_router       norm → scores → choices and weights; and ops beside the experts, such as a shared expert
    moe_preprocess   the permutation that sorts rows by expert, the rows per expert, the sorted rows
    moe              everything except attention
    in no part       dispatch, the experts, combine: rows back in order, weighted, summed

The first two end at the dispatch of rows, or at the first use of expert weights: the host knows the counts of rows only
afterwards. A value that later ops read is computed before the dispatch if possible.
"""

from collections.abc import Collection, Sequence

from torch import fx

from passes.moe.domain import domain_of
from passes.moe.layers import Dispatch, ExpertLayer
from passes.program.ops.aten import num_addends
from passes.program.walks import operands, readers, walk

ROUTER, PREPROCESS, WHOLE = "moe_router", "moe_preprocess", "moe"
EXPERT_PARTS = frozenset({ROUTER, PREPROCESS, WHOLE})


def layers_of(block: Sequence[fx.Node], layers: Sequence[ExpertLayer]) -> list[ExpertLayer]:
    names = {node.name for node in block}
    return [layer for layer in layers if layer.logits in names]


def expert_parts_of(
    rest: Sequence[fx.Node], layers: Sequence[ExpertLayer], on_batch: Collection[fx.Node]
) -> list[tuple[str, list[fx.Node]]]:
    """Return (part, nodes) of router and preprocessing, in the order in which they run.

    ``rest``: the block without attention. A part contains all its inputs within ``rest``, except those of the part
    before it. ``on_batch``: nodes that depend on a batch tensor.
    """
    inside = set(rest)
    behind = set(walk(_by_expert(rest, layers), readers, into=lambda n: n in inside))
    behind |= _for_alone(behind, rest, on_batch)
    before = [node for node in rest if node not in behind]
    decisive = [node for layer in layers for node in _choices(before, layer)]
    deciding = set(walk(decisive, operands, into=lambda n: n in inside))
    planning = set(walk(decisive, readers, into=lambda n: n in inside and n not in behind)) - deciding
    planning |= _for_alone(planning, before, on_batch)
    router = {node for node in before if node not in planning}
    router -= _too_late(router) - deciding
    parts = [
        (ROUTER, [node for node in before if node in router]),
        (PREPROCESS, [node for node in before if node in planning]),
    ]
    return [(part, nodes) for part, nodes in parts if nodes]


def _choices(before: Sequence[fx.Node], layer: ExpertLayer) -> list[fx.Node]:
    """Return the chosen experts, with the routing weights if there is one per choice, not one per expert."""
    chosen, probs = ([node for node in before if node.name in names] for names in (layer.chosen, layer.probs))
    sizes = [sum(node.meta["val"].numel() for node in nodes) for nodes in (chosen, probs)]
    return chosen + probs if sizes[0] == sizes[1] else chosen


def _by_expert(rest: Sequence[fx.Node], layers: Sequence[ExpertLayer]) -> list[fx.Node]:
    """Return the calls on rows sorted by expert, and those that read expert weights."""
    names = {name for layer in layers for weight in layer.weights for name in weight.nodes}
    names |= {name for layer in layers for name in layer.products}
    read = {node: {node.name, *(n.name for n in node.all_input_nodes)} for node in rest}
    return [node for node in rest if domain_of(node) is not None or not names.isdisjoint(read[node])]


def _too_late(part: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes of ``part``, with their dependents, that would change the order of a gradient's addends if
    captured: they read a value after ops outside of ``part``, as a shared expert after a loop over experts.
    """
    late = set[fx.Node]()
    for value in dict.fromkeys(v for node in part for v in node.all_input_nodes if v.meta.get("grad")):
        mine = [user for user in value.users if user in part]
        others = [user for user in value.users if user not in part and user > min(mine)]
        after = [user for user in mine if others and user > min(others)]
        if sum(num_addends(n, value) for n in others) > 1 or sum(num_addends(n, value) for n in after) > 1:
            late |= set(after)
    return set(walk(late, readers, into=lambda n: n in part))


def _for_alone(part: Collection[fx.Node], nodes: Sequence[fx.Node], on_batch: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that do not depend on the batch and that ``part`` alone reads, such as views of weights."""
    private = set[fx.Node]()
    for node in reversed(nodes):
        if node not in on_batch and node.users and all(user in part or user in private for user in node.users):
            private.add(node)
    return private


def of_uncertain_size(nodes: Sequence[fx.Node], layers: Sequence[ExpertLayer]) -> fx.Node | None:
    """Return the first product among ``nodes`` with a data-dependent number of rows per expert, or None."""
    products = {name for layer in layers if layer.dispatch is Dispatch.OFFSETS for name in layer.products}
    return next((node for node in nodes if node.name in products), None)
