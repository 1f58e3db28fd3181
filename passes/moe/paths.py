"""The path of a token through a layer of experts, and the products on it.

tokens → (sorted, put into slots, copied) → first products … last products → times probs → summed: combined

column   h[.., e, w] = x[.., d] W[e, d, w]      the first: makes an expert's own features
row      y[.., d]    = h[.., e, w] W[e, w, d]   the last: sums over them
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from torch import fx

from passes.moe.expert_dims import Space
from passes.moe.layers import Dispatch, ExpertWeight
from passes.moe.ties import base, is_float, is_grouped, is_product, is_view, lookup, origin_of
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import ADDING, BINS, CUTS, FILLED, JOINS, LAID_OUT, PLACING, PRODUCTS, SORTS, Ops
from passes.program.walks import Reached, ancestors, between, meetings, operands, readers, walk
from passes.program.weights import is_computed_weight, is_parameter, is_weight
from passes.rules.rule import RESULT, operands_of
from passes.rules.table import rule_of

MOST = 200


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the experts' input with their weight. ``summed``, ``made``: dims of the weight."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    summed: int
    made: int
    by_ids: bool


def products_of(space: Space) -> list[Product]:
    """Return products that keep the experts apart, each with its own matrix of a stack, of which it may read a view, a
    change or a lookup by ids; in the graph's order."""
    is_end = lambda n: not is_weight(n) and n.target not in LAID_OUT and lookup(n) is None  # noqa: E731
    calls = {user for stack in stacks_in(space) for user in walk([stack], readers, stop=is_end) if user is not stack}
    found = [product_of(call, space.dim, space.ids) for call in sorted(calls)]
    return [p for p in found if p is not None and space.dim(p.weight) >= 0]


def stacks_in(space: Space) -> list[fx.Node]:
    """Return the weights with a dim of experts, but for those of the router."""
    return [n for n in space.places if is_parameter(n) and space.dim(n) >= 0 and not _is_of_router(space, n)]


def _is_of_router(space: Space, weight: fx.Node) -> bool:
    """Return whether a call from the first product of scores to the choices reads a weight, or scores alone are made of
    it. Those of a layer that is applied again are made of its experts too."""
    calls = set(walk([weight], readers, stop=lambda n: n is not weight and not is_computed_weight(n)))
    return any(n in space.scored and n in space.below for n in calls) or all(n in space.scored for n in calls)


def product_of(call: fx.Node, expert_dim: Callable[[fx.Node], int], ids: Collection[fx.Node] = ()) -> Product | None:
    """Return a product of a value and a weight; None for others, and if it sums over the experts themselves.
    ``expert_dim``: of a weight, or -1."""
    if is_weight(call):
        return None
    rule, read = rule_of(call) if is_product(call) else None, operands_of(call)
    if rule is None or (len(read) != 2 and call.target is aten.einsum.default):
        return None
    for at, w in enumerate(read[:2]):
        origins = [origin_of(w, d) for d in range(len(shape_of(w)))]
        weight = next((o[0] for o in origins if o is not None), None)
        if weight is None:
            continue
        experts, factors = expert_dim(weight), [rule.sole(at, d) for d in range(len(origins))]
        held = [(o, f.at(1 - at), f.at(RESULT)) for o, f in zip(origins, factors, strict=True) if f is not None]
        summed = [o for o, other, result in held if other is not None and result is None]
        made = [o for o, other, result in held if other is None and result is not None]
        made = [o for o in made if o is not None and o[1] != experts]
        if len(summed) == len(made) == 1 and summed[0] is not None and summed[0][1] != experts:
            seen = walk([w], lambda n: filter(is_float, n.all_input_nodes) if is_view(n) else ())
            is_by_ids = any(found[2] in ids for n in seen if (found := lookup(n)) is not None)
            return Product(call, read[1 - at], weight, summed[0][1], made[0][1], is_by_ids)
    return None


def most_alike(graph: fx.Graph) -> list[Product]:
    """Return the products of one value with matrices of one shape that are the most of all; a stack counts as many."""
    found = defaultdict[Any, list[Product]](list)
    for node in graph.nodes:
        if node.target in PRODUCTS and (p := product_of(node, lambda _: -1)) is not None:
            shape = shape_of(p.weight)
            found[p.x, shape] += [p] * (prod(shape) // (shape[p.summed] * shape[p.made]))
    return max(found.values(), key=len, default=[])


def ends(products: list[Product], above: Reached) -> tuple[list[Product], list[Product]]:
    """Return the products that no other of them comes before, and those that none comes after."""
    nodes = {p.node for p in products}
    before = {p.node: nodes.intersection(walk([p.x], operands, into=lambda n: n not in above)) for p in products}
    followed = set().union(*before.values())
    return [p for p in products if not before[p.node]], [p for p in products if p.node not in followed]


def weights_of(
    held: Iterable[tuple[tuple[fx.Node, ...], int]], products: list[Product], first: list[Product], last: list[Product]
) -> list[ExpertWeight]:
    """Return the weights of ``held`` nodes and dims of experts: those that products read, in their order, then others
    with a value for each expert, such as biases."""
    reader = {product.weight: product for product in products}
    order = {weight: place for place, weight in enumerate(reader)}

    def width(weight: fx.Node) -> int:
        product = reader.get(weight)
        if product is None or (product in first) == (product in last):
            return -1
        return product.made if product in first else product.summed

    found = sorted(held, key=lambda nodes_dim: order.get(nodes_dim[0][0], len(order)))
    return [ExpertWeight(names_of(nodes), shape_of(nodes[0]), dim, width(nodes[0])) for nodes, dim in found]


def names_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def read_with_stacks(space: Space) -> list[tuple[str, int]]:
    """Return values of all experts that are made of other weights and read beside a stack, directly or through calls by
    expert; with their dim of experts, in the graph's order."""
    stacks = stacks_in(space)
    made = set(walk(stacks, readers, into=lambda n: n in stacks or is_computed_weight(n)))
    beside = [n for call in made - set(stacks) for n in call.all_input_nodes if n not in made]
    first = walk(
        [n for n in beside if space.dim(n) >= 0], lambda n: n.all_input_nodes if _is_by_expert(space, n) else ()
    )
    return [(node.name, space.dim(node)) for node in sorted(set(first)) if not _is_by_expert(space, node)]


def _is_by_expert(space: Space, node: fx.Node) -> bool:
    """Return whether a call computes each expert's slice of its own slices: all that it reads has a dim of experts."""
    read = node.all_input_nodes if node.op == "call_function" else []
    return bool(read) and all(space.dim(n) >= 0 for n in read)


# ---- the path


def _source(node: fx.Node, space: Space) -> fx.Node:
    """Return the value that rows are, in another layout, sorted or copied."""
    while (found := lookup(node := base(node))) and not is_weight(found[0]) and found[2] not in space.ids:
        node = found[0]
    return node


def tokens_of(space: Space, first: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the values that experts read and their router did not make: one, if all is understood."""
    found = dict.fromkeys(_source(node, space) for node in _frontier(space, first))
    read = {n for n in found if n not in space.below}

    def is_made_of_others(node: fx.Node) -> bool:
        """Return whether other values alone, and no weights, lead to ``node``."""
        above = partial(walk, node.all_input_nodes, operands, stop=read.__contains__)
        return all(n in read or n.op == "call_function" for n in above()) and any(n in read for n in above())

    return [n for n in found if n in read and not is_made_of_others(n)]


def _frontier(space: Space, first: Iterable[fx.Node]) -> Iterable[fx.Node]:
    def within(node: fx.Node) -> bool:
        return node in space.below or bool(space.places.get(node))

    def ends(node: fx.Node) -> bool:
        """Return whether to stop: beyond products of scores, the router may read other values than experts do."""
        return not within(node) or is_weight(node) or (node in space.scored and is_product(node))

    for node in walk(first, operands, stop=ends):
        is_made = node.op == "placeholder" or bool(node.all_input_nodes)
        if not (within(node) or is_weight(node)) and is_float(node) and is_made and node.target not in FILLED:
            yield node


def dispatch_of(space: Space, first: Sequence[Product], tokens: fx.Node) -> tuple[Dispatch, int]:
    """Return how tokens come to the first products, and the slots of each expert."""
    if any(is_grouped(p.node) for p in first):
        return Dispatch.OFFSETS, 0
    if any(p.by_ids for p in first):
        return Dispatch.GATHERED, 0
    way = carrying(space, tokens, [p.x for p in first])
    fills = Ops("gather sum") | PLACING
    if any(is_product(n) or lookup(n) or n.target in fills for n in way):
        size = space.size * shape_of(first[0].weight)[first[0].summed]
        return (Dispatch.TAKEN if space.takes else Dispatch.CAPACITY), first[0].x.meta["val"].numel() // size
    return Dispatch.EVERY_TOKEN, 0


def is_taken(node: fx.Node, space: Space) -> bool:
    """Return whether it holds the rows that each expert took of the shared input, by lookup or one-hot product."""
    node, found = base(node), lookup(base(node))
    if found is not None:
        return base(found[2]) in space.chosen and not space.places.get(found[0])
    marks = [base(n) for n in node.all_input_nodes] if is_product(node) else []
    return any(packet_of(n.target) is aten.one_hot and base(n.all_input_nodes[0]) in space.chosen for n in marks)


def carrying(space: Space, tokens: fx.Node, ends: Collection[fx.Node]) -> set[fx.Node]:
    """Return values on the way from the tokens to ``ends``, except those that the router uses for scores."""
    return between([tokens], ends, lambda n: not (n in space.scored and is_product(n))) - {tokens}


def combined_of(space: Space, last: Collection[fx.Node], tokens: fx.Node, joins: bool = False) -> fx.Node | None:
    """Return the first sum after the last products that has the tokens' size again; ``joins``: a sum of two too."""
    ends = (n for n in meetings(last, most=MOST + 12 * len(last)) if n not in last)
    return next((n for n in ends if _is_whole_again(space, n, tokens, joins)), None)


def _is_whole_again(space: Space, node: fx.Node, tokens: fx.Node, joins: bool) -> bool:
    packet, rule = packet_of(node.target), rule_of(node) if is_product(node) else None
    contracts = rule is not None and any(f.at(RESULT) is None for f in rule.factors)
    if not (contracts or node.target in ADDING or packet is aten.sum or (joins and packet is aten.add)):
        return False
    if space.places.get(node):
        return False
    of_rows = joins and shape_of(node)[:-1] == shape_of(tokens)[:-1]  # experts that share their first layers change it
    return of_rows or node.meta["val"].numel() == tokens.meta["val"].numel()


def probs_of(space: Space, way: set[fx.Node], carried: set[fx.Node]) -> list[fx.Node]:
    """Return routing weights: floats of the router that multiply ``carried`` values, at a call on the ``way``."""
    found: dict[fx.Node, None] = {}
    for node in sorted(way):
        read = node.all_input_nodes if packet_of(node.target) is aten.mul or is_product(node) else []
        others = [n for n in read if n not in carried and is_float(n) and n in space.below]
        if any(n in carried for n in read):
            sources = [_source(n, space) for n in others]
            found |= dict.fromkeys(n for n in sources if n.op == "call_function" and not is_weight(n))
    return list(found)


def choices_of(space: Space, combined: fx.Node) -> tuple[list[fx.Node], int]:
    """Return the ids that the layer goes by, and how many they are for each token."""
    above = between(space.ids, [combined])
    found: dict[fx.Node, None] = {}
    for node in sorted(space.ids & above):
        if any(user in above and user not in space.ids for user in node.users if _goes_by_id(space, user, node)):
            found[_first_ids(space, node)] = None
    parts = {n for joined in found if joined.target in JOINS for n in ancestors([joined]) - {joined}}
    found = {n: None for n in found if n not in parts}
    num_tokens = space.root.meta["val"].numel() // shape_of(space.root)[-1]
    total = sum(n.meta["val"].numel() for n in found)
    return list(found), total // max(num_tokens, 1) if total % max(num_tokens, 1) == 0 else 0


def _goes_by_id(space: Space, user: fx.Node, ids: fx.Node) -> bool:
    by_table = (found := lookup(user)) is not None and found[2] is ids
    others = [n for n in user.all_input_nodes if n is not ids and n in space.ids]
    is_asked = packet_of(user.target) is aten.eq and not others
    return named(user).get("index") is ids or by_table or is_asked or user.target in BINS | SORTS


def _first_ids(space: Space, node: fx.Node) -> fx.Node:
    """Return the call that chose or combined ids, before they were rearranged, copied or sorted."""
    while node.target not in JOINS and not _is_part_of_ranking(node):
        sources = [n.all_input_nodes[0] if packet_of(n.target) is aten.sort else n for n in node.all_input_nodes]
        above = [n for n in sources if n in space.ids]
        if not above:
            break
        node = above[0]
    return node


def _is_part_of_ranking(node: fx.Node) -> bool:
    """Return whether it takes some places of a ranking [.., k], of which nothing reads others."""
    if node.target not in CUTS:
        return False
    (ranking,), whole = node.all_input_nodes, shape_of(node.all_input_nodes[0])
    is_less = shape_of(node)[:-1] == whole[:-1] and len(shape_of(node)) == len(whole) and shape_of(node) != whole
    return is_less and list(ranking.users) == [node]
