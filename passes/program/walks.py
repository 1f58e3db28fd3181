"""Walks over a captured graph: the inputs of a value, and its dependents.

ancestors([y])                        y and all its inputs, direct or not
meetings([a, b])                      the nodes that all of them lead to, in the graph's order
walk([y], operands, stop=is_weight)   the same, not beyond weights (which come too)
between([x], [y])                     the nodes on the ways from one to the other
Reach(nodes, readers).of([x])         all that x leads to, for many x of one graph: a bit for each node
in_order([y])                         y and all its inputs, each after its own, y last
in_turn({y: [x], …}, rank)            the same of any units, those of a lower rank first
"""

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any, NamedTuple, TypeVar

from torch import fx

T = TypeVar("T", bound=Hashable)  # a node, or a node with some fact
Step = Callable[[fx.Node], Iterable[fx.Node]]


def operands(node: fx.Node) -> Iterable[fx.Node]:
    """Return the step up: the inputs of a node."""
    return node.all_input_nodes


def readers(node: fx.Node) -> Iterable[fx.Node]:
    """Return the step down: the users of a node."""
    return node.users


def neighbours(node: fx.Node) -> Iterable[fx.Node]:
    """Return the step either way."""
    return (*node.all_input_nodes, *node.users)


def walk(
    start: Iterable[T],
    step: Callable[[T], Iterable[T]],
    *,
    into: Callable[[T], bool] = lambda _: True,
    stop: Callable[[T], bool] = lambda _: False,
    most: int | None = None,
) -> Iterator[T]:
    """``start`` and all that ``step`` leads to, each once, depth first; ``step`` is asked after the node was given.

    ``into``: other nodes are left out, and nothing beyond them is walked. ``stop``: such nodes come, but nothing beyond
    them. ``most``: the number of nodes at most.
    """
    stack, seen = list(start), set[T]()
    while stack and (most is None or len(seen) < most):
        node = stack.pop()
        if node not in seen and into(node):
            seen.add(node)
            yield node
            if not stop(node):
                stack.extend(step(node))


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes themselves and all that they are made of."""
    return set(walk(nodes, operands))


class Reached(NamedTuple):
    """Nodes of one graph, of which only ``in`` can be asked."""

    bits: int
    place: Mapping[fx.Node, int]

    def __contains__(self, node: object) -> bool:
        return bool(self.bits >> self.place[node] & 1)  # pyright: ignore[reportArgumentType]


class Reach:
    """What nodes of one graph lead to, a bit for each. What single nodes lead to is kept, and taken over on the way of
    others: ask for those first that others lead to.
    """

    def __init__(self, nodes: Iterable[fx.Node], step: Step) -> None:
        """``nodes``: all of a graph, each before those that it leads to."""
        self._nodes, self._step = list(nodes), step
        self._place = {node: i for i, node in enumerate(self._nodes)}
        self._known: dict[fx.Node, int] = {}

    def of(self, nodes: Collection[fx.Node]) -> Reached:
        """Return the nodes themselves and all that they lead to."""
        found, work = 0, [self._place[node] for node in nodes]
        heapq.heapify(work)
        while work:
            place = heapq.heappop(work)
            if found >> place & 1:
                continue
            node = self._nodes[place]
            found |= self._known.get(node, 1 << place)
            for n in self._step(node) if node not in self._known else ():
                heapq.heappush(work, self._place[n])
        if len(nodes) == 1:
            self._known.update(dict.fromkeys(nodes, found))
        return Reached(found, self._place)


def between(
    starts: Collection[fx.Node], ends: Collection[fx.Node], into: Callable[[fx.Node], bool] = lambda _: True
) -> set[fx.Node]:
    """The nodes that ``starts`` lead to and that lead to ``ends``, these with them. ``into``: others are left out."""
    last = max(ends)  # nodes of one graph are in its order: no walk beyond
    below = set(walk(starts, readers, into=lambda n: n <= last and into(n)))
    return set(walk(ends, operands, into=below.__contains__))


def leads_out(node: fx.Node, groups: Mapping[fx.Node, T]) -> bool:
    """Whether a node leads to others than those of its group: y + zeros(n), which y's mask hides again, does not."""
    group = groups[node]

    def comes_back(n: fx.Node) -> bool:
        return bool(n.users) and all(groups.get(m, group) == group for m in (*n.all_input_nodes, *n.users))

    outside = walk([n for n in node.users if n not in groups], readers, into=lambda n: n not in groups)
    return not node.users or not all(map(comes_back, outside))


def meetings(tips: Collection[fx.Node], *, most: int) -> Iterator[fx.Node]:
    """Yield calls that every one of ``tips`` leads to, in the graph's order. ``most``: how many calls are looked at."""
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


def last_of_header(value: fx.Node) -> fx.Node:
    """The node behind which a call on ``value`` stands: itself, or the last of the placeholders and attributes."""
    if value.op == "call_function":
        return value
    return [n for n in value.graph.nodes if n.op in ("placeholder", "get_attr")][-1]


def in_turn(reads: Mapping[T, Iterable[T]], rank: Mapping[T, Any]) -> list[T]:
    """Return each key of ``reads`` after those that it reads; of several that may come next, that of the least rank."""
    sorter, ready, order = TopologicalSorter(reads), list[tuple[Any, int, T]](), list[T]()
    place = {unit: i for i, unit in enumerate(reads)}
    sorter.prepare()
    while sorter.is_active():
        for unit in sorter.get_ready():
            heapq.heappush(ready, (rank[unit], place[unit], unit))
        order.append(heapq.heappop(ready)[2])
        sorter.done(order[-1])
    return order
