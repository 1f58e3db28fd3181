"""Walks over a captured graph: the inputs of a value, and its dependents.

ancestors([y])                        y and all its inputs, direct or not
meetings([a, b])                      the nodes that all of them lead to, in the graph's order
walk([y], operands, stop=is_weight)   the same, not beyond weights (which come too)
in_order([y])                         the same, each after its inputs, y last
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator

from torch import fx

Step = Callable[[fx.Node], Iterable[fx.Node]]


def operands(node: fx.Node) -> Iterable[fx.Node]:
    """The step up: the inputs of a node."""
    return node.all_input_nodes


def readers(node: fx.Node) -> Iterable[fx.Node]:
    """The step down: the users of a node."""
    return node.users


def neighbours(node: fx.Node) -> Iterable[fx.Node]:
    """The step either way."""
    return (*node.all_input_nodes, *node.users)


def walk(
    start: Iterable[fx.Node],
    step: Step,
    *,
    into: Callable[[fx.Node], bool] = lambda _: True,
    stop: Callable[[fx.Node], bool] = lambda _: False,
    most: int | None = None,
) -> Iterator[fx.Node]:
    """``start`` and all that ``step`` leads to, each once, depth first.

    ``into``: other nodes are left out, and nothing beyond them is walked. ``stop``: such nodes come, but nothing beyond
    them. ``most``: the number of nodes at most.
    """
    stack, seen = list(start), set[fx.Node]()
    while stack and (most is None or len(seen) < most):
        node = stack.pop()
        if node not in seen and into(node):
            seen.add(node)
            yield node
            if not stop(node):
                stack.extend(step(node))


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes themselves and all that they are made of."""
    return set(walk(nodes, operands))


def meetings(tips: Collection[fx.Node], *, most: int) -> Iterator[fx.Node]:
    """Calls that every one of ``tips`` leads to, in the graph's order. ``most``: how many calls are looked at."""
    reached: dict[fx.Node, set[fx.Node]] = {tip: {tip} for tip in tips}
    work, seen = sorted(tips), set(tips)
    for _ in range(most):
        if not work:
            return
        node = heapq.heappop(work)
        for above in node.all_input_nodes:
            reached.setdefault(node, set()).update(reached.get(above, ()))
        if len(reached[node]) == len(tips):
            yield node
        for user in node.users:
            if user not in seen and user.op == "call_function":
                seen.add(user)
                heapq.heappush(work, user)


def in_order(nodes: Iterable[fx.Node], given: Collection[fx.Node] = (), step: Step = operands) -> list[fx.Node]:
    """The nodes and their inputs, each after its inputs; without ``given`` nodes, and without inputs of those alone."""
    seen, order = set[fx.Node](), []
    stack = [(node, False) for node in nodes]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in seen and node not in given:
            seen.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n in step(node))
    return order
