"""Which integers are numbers of experts, and which dims they make that count experts.

chosen = topk(scores, k).indices        ids; so are their reshapes, sorted ones, concatenations
one_hot(ids, E), histc(ids, E), scatter(…[.., E], dim, ids), W[ids], ids == arange(E)      a dim of experts
grouped_mm(rows, W, ends) with ends [E] that are computed of ids                              too
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem

from torch import Tensor, fx

from passes.moe.ties import is_grouped, lookup
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import BEST, BINS, CUTS, JOINS, LAID_OUT, SORTS, SPLITS
from passes.program.walks import walk


def selections(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, list[fx.Node]]]:
    """(call, dim, nodes of its indices) of calls that choose along a dim, with a choice that is read."""
    for node in graph.nodes:
        given = named(node) if node.target in BEST | SORTS else {}
        if given.get("dim") is None or len(node.all_input_nodes) != 1:
            continue
        shape = shape_of(node.all_input_nodes[0])
        is_alone = isinstance(node.meta["val"], Tensor)
        found = [node] if is_alone else [n for n in node.users if n.target is getitem and n.args[1] == 1]
        if found and shape and _chooses(node, shape[int(given["dim"]) % len(shape)]):
            yield node, int(given["dim"]) % len(shape), found


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
    packet, found = packet_of(user.target), lookup(user)
    if user.target in JOINS:
        return all(n in known for n in user.all_input_nodes)
    if user.target is getitem:
        return packet_of(node.target) is not aten.sort or user.args[1] in (0,)
    if found is not None:
        return found[0] is node
    is_taken = packet in (aten.sort, aten.clamp) or (packet in (aten.gather, aten.index) and user.args[0] is node)
    return is_taken or user.target in LAID_OUT | CUTS | SPLITS


def dims_of_experts(ids: set[fx.Node], size: int) -> Iterator[tuple[fx.Node, int]]:
    """(node, dim) that count experts since ids say which."""
    for node in sorted(ids):
        for user in node.users:
            if user.op == "call_function":
                yield from _made(user, node, size)
    for node in walk(ids, _counting):
        if shape_of(node) == (size,) and any(is_grouped(user) and user.args[2] is node for user in node.users):
            yield node, 0


def _counting(node: fx.Node) -> Iterator[fx.Node]:
    """What is computed of ids without a gradient: the ends of the rows of each expert, however they are counted."""
    yield from (user for user in node.users if user.op == "call_function" and not user.meta["grad"])


def _made(user: fx.Node, ids: fx.Node, size: int) -> Iterator[tuple[fx.Node, int]]:
    packet, given, shape = packet_of(user.target), named(user), shape_of(user)
    found = lookup(user)
    if found is not None and found[2] is ids:
        yield found[0], found[1]
    elif given.get("index") is ids and "dim" in given:
        table = given["self"]
        yield table, int(given["dim"]) % len(shape_of(table))
    elif user.target in BINS and shape[-1] == size:
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
