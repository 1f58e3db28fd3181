"""One numbering of experts: the dims of the graph that count it, from the scores of its router on.

    chosen = topk(scores, k).indices        ids; so are their reshapes, sorted ones, concatenations
    chosen = table[tokens]                  too, if they pick the weights: scores.gather(-1, chosen)
    one_hot(ids, E), histc(ids, E), scatter(…[.., E], dim, ids), W[ids], ids == arange(E)      a dim of experts
    grouped_mm(rows, W, ends) with ends [E] that are computed of ids                              too

The scores' dim, and every dim that ids make, are tied to others by the ops between (ties); a stack of weights is one
with such a tied dim. Numberings of other routers are kept apart, even if a loss adds their counts. Stacks may have no
such dim, as places of slots are computed from the numbers of experts:

    at = expert · C + place     buffer[at] += rows     buffer[E, C, d] @ W[E, d, h]
    rows[expert, place] = x                            rows[E, C, d] @ W[E, d, h]

Such a buffer, through views, is multiplied with stacks in products that keep one dim of them as a batch dim: the dim of
experts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from operator import getitem

from torch import Tensor, fx

from passes.moe.ties import base, is_float, is_grouped, lookup, origin_of
from passes.program.ops.aten import aten, is_pointwise, named, packet_of, shape_of
from passes.program.ops.groups import BEST, BINS, JOINS, MOVED, PLACING, PRODUCTS, SORTS, SPLITS
from passes.program.walks import Reach, Reached, operands, readers, walk
from passes.program.weights import is_parameter, is_weight
from passes.rules.follow import Known, Place, tied
from passes.rules.rule import RESULT, operands_of
from passes.rules.table import rule_of

CHOOSING, PARTS = BEST | SORTS, MOVED | SPLITS


@dataclass
class Space:
    """A numbering of ``size`` experts. ``root``: the product that makes scores; ``choices``: the calls that choose by
    them; ``takes``: of tokens, by experts. ``above``: all that the scores are made of, ``scored``: that the choices
    are, ``below``: all that depends on the scores.
    """

    root: fx.Node
    size: int
    takes: bool = False
    choices: list[fx.Node] = field(default_factory=list)
    seeds: list[tuple[fx.Node, int]] = field(default_factory=list)
    chosen: list[fx.Node] = field(default_factory=list)
    ids: set[fx.Node] = field(default_factory=set)
    places: dict[fx.Node, set[Place]] = field(default_factory=dict)
    above: Reached = field(init=False)
    scored: Reached = field(init=False)
    below: Reached = field(init=False)

    def dim(self, node: fx.Node) -> int:
        """Return the dim that counts the experts and nothing else; -1 if there is none."""
        whole = [d for d, inner in self.places.get(node, ()) if inner == 1 and shape_of(node)[d] == self.size]
        return whole[0] if len(whole) == 1 else -1


def spaces(graph: fx.Graph) -> list[Space]:
    """Return the numbering of each router, the last first; then of each ranking of tokens by which the experts of a
    stack may take theirs. Whether they have experts is decided later."""
    sizes = {n for w in graph.find_nodes(op="placeholder") if is_parameter(w) and len(s := shape_of(w)) > 2 for n in s}
    known, found = cache(rule_of), dict[tuple[fx.Node, int], Space]()
    for node, ranked, chosen in (*_selections(graph), *_given(graph)):
        scores = node.all_input_nodes[0]
        for dim, size in enumerate(shape_of(scores)):
            takes = dim != ranked
            if not takes or (size in sizes and packet_of(node.target) is aten.topk):
                root = _root(known, scores, dim, size)
                space = found.setdefault((node, dim) if takes else (root, size), Space(root, size, takes))
                space.choices.append(node)
                space.seeds.append((scores, dim))
                space.chosen += chosen
    order = sorted(found.values(), key=lambda space: space.root, reverse=True)
    _grow(graph, known, order)
    return sorted(order, key=lambda space: space.takes)


def _root(known: Known, scores: fx.Node, dim: int, size: int) -> fx.Node:
    """Return the product that made the scores; without one, the scores."""
    up = lambda at: [n for n in tied(at[0], at[0], at[1], size, known) if n[0] in at[0].all_input_nodes]  # noqa: E731
    seen = walk([(scores, (dim, 1))], up, stop=lambda at: at[0].target in PRODUCTS)
    return min((node for node, _ in seen if node.target in PRODUCTS), default=scores)


def _grow(graph: fx.Graph, known: Known, order: list[Space]) -> None:
    """Find all that depends on each, and its places. ``order``: of their roots, the last first."""
    up, down = Reach(reversed(graph.nodes), operands), Reach(graph.nodes, readers)
    for space in order:  # see Reach
        space.below = down.of([space.root])
    for space in reversed(order):
        space.above, space.scored = up.of([space.root]), up.of(space.choices)
        roots = {} if space.takes else {s.root for s in order if not s.takes and s.root not in space.above}
        _find_places(space, known, down.of(roots))


def _find_places(space: Space, known: Known, of_others: Reached) -> None:
    """Find places from the scores' dim and from the dims that ids make, up to values ``of_others``: other routers, and
    all that depends on these."""
    space.ids = set() if space.takes else _spread(space.chosen)
    of_ids = [*_dims_of_experts(space.ids, space.size), *_stacks_of_slots(space.ids, space.size, space.below)]

    def counts(at: tuple[fx.Node, Place]) -> bool:
        node, (dim, inner) = at
        is_above = node in space.above and node is not space.root and node.op != "placeholder" and not is_weight(node)
        return not is_above and node not in of_others and shape_of(node)[dim] % (inner * space.size) == 0

    def beside(at: tuple[fx.Node, Place]) -> Iterator[tuple[fx.Node, Place]]:
        return chain.from_iterable(tied(call, *at, space.size, known) for call in (at[0], *at[0].users))

    start = [(node, (dim, 1)) for node, dim in [*space.seeds, *of_ids]]
    for node, place in walk(start, beside, into=counts):
        space.places.setdefault(node, set()).add(place)


# ---- integers that are numbers of experts


def _selections(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, list[fx.Node]]]:
    """Yield (call, dim, nodes of its indices) of calls that choose by several scores along a dim, the best of them or
    all in their order, with a choice that is read."""
    for node in graph.nodes:
        given = named(node) if node.target in CHOOSING else {}
        if given.get("dim") is None or len(node.all_input_nodes) != 1:
            continue
        shape = shape_of(node.all_input_nodes[0])
        is_alone = isinstance(node.meta["val"], Tensor)
        found = [node] if is_alone else [n for n in node.users if n.target is getitem and n.args[1] == 1]
        if found and shape and is_float(node.all_input_nodes[0]) and shape[int(given["dim"]) % len(shape)] > 1:
            yield node, int(given["dim"]) % len(shape), found


def _given(graph: fx.Graph) -> Iterator[tuple[fx.Node, int, list[fx.Node]]]:
    """Yield (call, dim, [numbers]) of calls that pick scores by numbers that no score decided, but integers of the
    batch: those of a table of tokens, say."""
    inputs = [n for n in graph.find_nodes(op="placeholder") if not is_parameter(n) and not n.meta.get("known")]
    is_of_integers = lambda n: n.op != "output" and not any(map(is_float, (n, *n.all_input_nodes)))  # noqa: E731
    of_batch = set(walk(inputs, readers, into=is_of_integers))
    for node in graph.nodes:
        if packet_of(node.target) is aten.gather:
            scores, dim, numbers = node.args[:3]
            shape = shape_of(scores)
            if numbers in of_batch and is_float(scores) and scores.meta["grad"] and shape[dim % len(shape)] > 1:
                yield node, dim % len(shape), [base(numbers)]


def _spread(chosen: Iterable[fx.Node]) -> set[fx.Node]:
    """Return all values with such ids as elements."""
    known = set[fx.Node]()
    for node in walk(chosen, lambda n: [u for u in n.users if u.op == "call_function" and _is_same(u, n, known)]):
        known.add(node)
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
    return is_taken or user.target in PARTS


def _dims_of_experts(ids: set[fx.Node], size: int) -> Iterator[tuple[fx.Node, int]]:
    """Yield (node, dim) that count experts because ids index them."""
    for node, user in [(n, u) for n in sorted(ids) for u in n.users if u.op == "call_function"]:
        yield from _dims_made(user, node, size)
    # computed of ids without a gradient: the ends of the rows of each expert, however they are counted
    for node in walk(ids, lambda n: [u for u in n.users if u.op == "call_function" and not u.meta["grad"]]):
        if shape_of(node) == (size,) and any(is_grouped(user) and user.args[2] is node for user in node.users):
            yield node, 0


def _dims_made(user: fx.Node, ids: fx.Node, size: int) -> Iterator[tuple[fx.Node, int]]:
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
        numbers, ahead = base(other), len(shape) - len(shape_of(other))
        if packet_of(numbers.target) is aten.arange and shape_of(numbers) == (size,):
            yield from ((user, d + ahead) for d, n in enumerate(shape_of(other)) if n == size == shape[d + ahead])


# ---- stacks that are multiplied with slots


def _stacks_of_slots(ids: Iterable[fx.Node], size: int, below: Reached) -> Iterator[tuple[fx.Node, int]]:
    """Yield (weight, dim) of stacks multiplied with slots that are filled by numbers of experts. ``below``: values that
    depend on the router, so a residual ends the path to them."""

    is_own = lambda n: is_weight(n) or not n.all_input_nodes  # noqa: E731  # no value of tokens

    def through(node: fx.Node) -> Iterator[fx.Node]:
        return (u for u in node.users if _passes(u) and all(n in below or is_own(n) for n in u.all_input_nodes))

    numbers = set(walk(ids, readers, into=lambda n: n.op != "output" and not is_float(n)))
    placed = [u for n in sorted(numbers) for u in n.users if u not in numbers and _is_placed(u, numbers)]
    for product in sorted(u for n in walk(placed, through) for u in n.users if u.target in PRODUCTS):
        yield from _kept_apart(product, size)


def _kept_apart(product: fx.Node, size: int) -> Iterator[tuple[fx.Node, int]]:
    """Yield (weight, dim) of ``size`` that a product keeps apart: it is a dim of both operands, and of the result."""
    rule, read = rule_of(product), operands_of(product)
    if rule is None:
        return
    for factor in rule.factors:
        if factor.size == size and all(factor.at(i) is not None for i in (RESULT, *range(len(read)))):
            inside = [p for p in factor.places if p.operand != RESULT and rule.sole(p.operand, p.dim) is factor]
            origins = [origin_of(read[p.operand], p.dim) for p in inside]
            yield from (origin for origin in origins if origin is not None)


def _is_placed(call: fx.Node, numbers: set[fx.Node]) -> bool:
    """Return whether a call puts or picks values at places that ``numbers`` say."""
    if call.op != "call_function" or not is_float(call):
        return False
    found, given = lookup(call), named(call)
    if found is not None:
        return found[2] in numbers and not is_weight(found[0])
    if call.target in PLACING or packet_of(call.target) in (aten.gather, aten.index):
        index = given.get("index", given.get("indices"))
        return any(n in numbers for n in (index if isinstance(index, list | tuple) else [index]))
    return False


def _passes(call: fx.Node) -> bool:
    return call.target in MOVED or call.target in JOINS or is_pointwise(call.target)
