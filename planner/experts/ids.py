"""Which integers are numbers of experts, and which dims they make that count experts.

chosen = topk(scores, k).indices        ids; so are their reshapes, sorted ones, concatenations
one_hot(ids, E), histc(ids, E), scatter(…[.., E], dim, ids), W[ids], ids == arange(E)      a dim of experts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem

from torch import fx

from planner.experts.ties import lookup
from planner.graph.ops.aten import aten, named, packet_of, shape_of
from planner.graph.ops.groups import JOINS, LAID_OUT, Ops
from planner.graph.walks import walk

PASSED = LAID_OUT | Ops("slice select clamp argsort")
SELECTIONS = {aten.topk, aten.max, aten.sort, aten.argmax, aten.argsort}


def selections(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, list[fx.Node]]]:
    """(call, dim, nodes of its indices) of calls that choose along a dim, with a choice that is read."""
    for node in graph.nodes:
        packet = packet_of(node.target) if node.op == "call_function" else None
        if packet not in SELECTIONS or (dim := named(node).get("dim", None if packet is aten.max else -1)) is None:
            continue
        shape = shape_of(node.all_input_nodes[0])
        is_alone = packet in (aten.argmax, aten.argsort)
        found = [node] if is_alone else [n for n in node.users if n.target is getitem and n.args[1] == 1]
        if found and shape and len(node.all_input_nodes) == 1 and _chooses(node, shape[int(dim) % len(shape)]):
            yield node, int(dim) % len(shape), found


def _chooses(node: fx.Node, size: int) -> bool:
    """Whether it is by floating-point scores, the best of them or all in their order, and they are several."""
    floats = bool(node.all_input_nodes[0].meta["val"].dtype.is_floating_point)
    return floats and size > 1


def spread(chosen: Iterable[fx.Node]) -> set[fx.Node]:
    """All values with such ids as elements."""
    known: set[fx.Node] = set()
    work = list(chosen)
    while work:
        node = work.pop()
        if node not in known:
            known.add(node)
            work += [user for user in node.users if user.op == "call_function" and _is_same(user, node, known)]
    return known


def _is_same(user: fx.Node, node: fx.Node, known: set[fx.Node]) -> bool:
    packet = packet_of(user.target)
    if packet in JOINS:
        return all(n in known for n in user.all_input_nodes)
    if user.target is getitem:
        return packet_of(node.target) is aten.sort and user.args[1] in (0,)
    if packet is aten.argsort:
        return False
    found = lookup(user)
    if found is not None:
        return found[0] is node
    return packet in PASSED or packet is aten.sort or (packet is aten.gather and user.args[0] is node)


def dims_of_experts(ids: set[fx.Node], size: int) -> Iterator[tuple[fx.Node, int]]:
    """(node, dim) that count experts since ids say which."""
    for node in sorted(ids):
        for user in node.users:
            if user.op == "call_function":
                yield from _made(user, node, size)


def _made(user: fx.Node, ids: fx.Node, size: int) -> Iterator[tuple[fx.Node, int]]:
    packet, given, shape = packet_of(user.target), named(user), shape_of(user)
    found = lookup(user)
    if found is not None and found[2] is ids:
        yield found[0], found[1]
    elif packet in (aten.scatter, aten.scatter_add, aten.gather) and given.get("index") is ids:
        table = given["self"]
        yield table, int(given["dim"]) % len(shape_of(table))
    elif packet in (aten.one_hot, aten.histc, aten.bincount) and shape[-1] == size:
        yield user, len(shape) - 1
    elif packet is aten.eq and isinstance(other := user.args[1 - user.args.index(ids)], fx.Node):
        base = next((n for n in walk([other], _through) if not n.all_input_nodes), None)
        if base is not None and packet_of(base.target) is aten.arange and shape_of(base) == (size,):
            yield from (
                (user, d) for d, n in enumerate(shape_of(user)) if n == size and _from_last(other, user, d) == n
            )


def _from_last(x: fx.Node, user: fx.Node, dim: int) -> int:
    position = dim - len(shape_of(user)) + len(shape_of(x))
    return shape_of(x)[position] if position >= 0 else 1


def _through(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes if node.target in LAID_OUT else ()
