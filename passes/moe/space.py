"""One numbering of experts: the dims of the graph that count it, from the scores of its router on.

The scores' dim, and every dim that ids of chosen experts make, are tied to others by the ops between (ties); a stack of
weights is one with such a tied dim. Numberings of other routers are kept apart, even if a loss adds their counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from passes.moe.ids import dims_of_experts, selections, spread
from passes.moe.slots import stacks_of_slots
from passes.moe.ties import Place, Ties
from passes.program.ops.aten import aten, packet_of, shape_of
from passes.program.ops.products import PRODUCTS
from passes.program.walks import ancestors, readers, walk
from passes.program.weights import is_parameter, is_weight


@dataclass
class Space:
    """A numbering of ``size`` experts. ``root``: the product that makes scores, ``choices``: the calls that choose by
    them.
    """

    root: fx.Node
    size: int
    choices: list[fx.Node] = field(default_factory=list)
    seeds: list[tuple[fx.Node, int]] = field(default_factory=list)
    chosen: list[fx.Node] = field(default_factory=list)
    ids: set[fx.Node] = field(default_factory=set)
    places: dict[fx.Node, set[Place]] = field(default_factory=dict)

    def dim(self, node: fx.Node) -> int:
        """The dim that counts the experts and nothing else; -1 if there is none."""
        whole = [d for d, inner in self.places.get(node, ()) if inner == 1 and shape_of(node)[d] == self.size]
        return whole[0] if len(whole) == 1 else -1

    @cached_property
    def above(self) -> set[fx.Node]:
        """All that the scores are made of."""
        return ancestors([self.root])

    @cached_property
    def scored(self) -> set[fx.Node]:
        """All that the choices are made of."""
        return ancestors(self.choices)

    @cached_property
    def below(self) -> set[fx.Node]:
        """All that depends on the scores."""
        return set(walk([self.root], readers))


def spaces(graph: fx.Graph) -> list[Space]:
    """One for each router; whether it has experts is decided later."""
    known = Ties()
    found: dict[tuple[fx.Node, int], Space] = {}
    for node, dim, chosen in selections(graph):
        scores = node.all_input_nodes[0]
        size = shape_of(scores)[dim]
        root = _root(known, scores, dim, size)
        space = found.setdefault((root, size), Space(root, size))
        space.choices.append(node)
        space.seeds.append((scores, dim))
        space.chosen += chosen
    roots = {space.root for space in found.values()}
    for space in found.values():
        space.ids = spread(space.chosen)
        _grow(known, space, roots)
    return list(found.values())


def takings(graph: fx.Graph) -> list[Space]:
    """One for each ranking of tokens by which the experts of a stack may take theirs; ``chosen``: which tokens."""
    sizes = {n for w in graph.find_nodes(op="placeholder") if is_parameter(w) and len(s := shape_of(w)) > 2 for n in s}
    known, found = Ties(), list[Space]()
    for node, ranked, chosen in selections(graph):
        scores = node.all_input_nodes[0]
        for dim, size in enumerate(shape_of(scores)):
            if dim != ranked and size in sizes and packet_of(node.target) is aten.topk:
                root = _root(known, scores, dim, size)
                found.append(Space(root, size, [node], [(scores, dim)], chosen))
    for space in found:
        _grow(known, space, {space.root})
    return found


def _root(known: Ties, scores: fx.Node, dim: int, size: int) -> fx.Node:
    """The product that made the scores; without one, the scores."""
    seen = {(scores, (dim, 1))}
    work, products = [(scores, (dim, 1))], set[fx.Node]()
    while work:
        node, place = work.pop()
        if node.target in PRODUCTS:
            products.add(node)
            continue
        for other, there in known.through(node, node, place, size):
            if other in node.all_input_nodes and (other, there) not in seen:
                seen.add((other, there))
                work.append((other, there))
    return min(products) if products else scores


def _grow(known: Ties, space: Space, roots: Iterable[fx.Node]) -> None:
    """Find all places, from the scores' dim and from the dims that ids make."""
    others = [r for r in roots if r is not space.root and r not in space.above]
    above = {n for n in space.above if n.op != "placeholder" and not is_weight(n)}
    closed = set(walk(others, readers)) | above - {space.root}
    of_ids = [*dims_of_experts(space.ids, space.size), *stacks_of_slots(space.ids, space.size, space.below)]
    work = [(node, (dim, 1)) for node, dim in [*space.seeds, *of_ids]]
    while work:
        node, place = work.pop()
        mine = space.places.setdefault(node, set())
        if place in mine or node in closed or shape_of(node)[place[0]] % (place[1] * space.size):
            continue
        mine.add(place)
        work.extend(known.next_to(node, place, space.size))
