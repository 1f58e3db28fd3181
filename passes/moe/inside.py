"""The inside of a layer of experts: stacks, values made of them alone, and the calls from the first to the last of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from torch import Tensor, fx

from passes.moe.layers import ExpertLayer
from passes.moe.refusals import Refusal
from passes.program.program import Program
from passes.program.walks import operands, readers, walk


def apart_from(program: Program, layer: ExpertLayer, layers: Iterable[ExpertLayer]) -> frozenset[fx.Node]:
    """The calls of other layers with weights of ``layer``: of a layer that a model applies several times."""
    held = {name for weight in layer.weights for name in weight.nodes}
    others = [o for o in layers if o.tokens != layer.tokens and held & {n for w in o.weights for n in w.nodes}]
    return frozenset(node for other in others for node in _calls_of(program, other))


def _calls_of(program: Program, layer: ExpertLayer) -> set[fx.Node]:
    """All calls from the tokens of a layer, and from its router, to its combined value."""
    first, last = [program.node(layer.tokens), program.node(layer.logits)], program.node(layer.combined)
    below = set(walk(first, readers, into=lambda n: n <= last))
    return below & set(walk([last], operands, into=lambda n: n > min(first))) - {first[0]}


def made_of(stacks: Iterable[fx.Node]) -> set[fx.Node]:
    """Stacks, and calls that read nothing else."""
    known = set(stacks)
    work = [u for n in sorted(known) for u in n.users]
    while work:
        node = work.pop()
        if node not in known and node.op == "call_function" and all(n in known for n in node.all_input_nodes):
            known.add(node)
            work += node.users
    return known


def inside_of(of_stacks: set[fx.Node], apart: Set[fx.Node]) -> set[fx.Node]:
    """Calls that read stacks, and calls between them; then calls that read only such values. Without those of other
    layers (``apart``)."""
    seeds = {u for n in of_stacks for u in n.users if u not in of_stacks and u not in apart}
    first, last = min(seeds), max(seeds)  # nodes of one graph are in its order: no walk beyond
    between = set(walk(seeds, readers, into=lambda n: n <= last))
    between &= set(walk(seeds, operands, into=lambda n: n >= first))
    inside = seeds | between
    while len(border_of(inside)) > 1:
        joined = {u for n in border_of(inside) for u in n.users if u not in inside and _joins(u, inside)}
        if not joined:
            break
        inside |= joined
    return inside


def outer_of(node: fx.Node, inside: Collection[fx.Node]) -> list[fx.Node]:
    """The values that a call reads from outside, except numbers that are the same for all."""
    return [n for n in node.all_input_nodes if n not in inside and not is_number(n)]


def is_number(node: fx.Node) -> bool:
    """Whether a value is one number, the same for all."""
    val = node.meta["val"]
    return isinstance(val, Tensor) and val.numel() == 1 and not node.meta["grad"]


def check_read(stacks: Iterable[fx.Node], inside: Collection[fx.Node], refusal: Refusal) -> None:
    for stack in stacks:
        if any(u not in inside for u in stack.users):
            raise refusal(stack, "a stack of experts is read outside the expert layer")


def border_of(inside: set[fx.Node]) -> list[fx.Node]:
    """Calls inside that others read, in the graph's order."""
    return [n for n in sorted(inside) if any(u not in inside for u in n.users)]


def _joins(user: fx.Node, inside: set[fx.Node]) -> bool:
    return user.op == "call_function" and all(n in inside for n in operands(user))
