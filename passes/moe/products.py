"""The products of experts: which of their weights' dims are summed, and in which order they follow each other.

column   h[.., e, w] = x[.., d] W[e, d, w]      the first: makes an expert's own features
row      y[.., d]    = h[.., e, w] W[e, w, d]   the last: sums over them
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import fx

from passes.moe.layers import ExpertWeight
from passes.moe.space import Space
from passes.moe.ties import is_product, lookup
from passes.moe.weights import is_view, origin_of
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.groups import LAID_OUT
from passes.program.walks import operands, readers, walk
from passes.program.weights import is_computed_weight, is_parameter, is_weight
from passes.rules.call import operands_of
from passes.rules.rule import RESULT
from passes.rules.table import rule_of


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
    """Products that keep the experts apart, each with its own matrix of a stack; in the graph's order."""

    def step(node: fx.Node) -> Iterable[fx.Node]:
        return node.users if is_computed_weight(node) else _readers_of_weight(node)

    calls = {user for stack in stacks_in(space) for user in walk([stack], step) if user.op != "placeholder"}
    found = [product_of(call, space.dim, space.ids) for call in sorted(calls)]
    return [p for p in found if p is not None and space.dim(p.weight) >= 0]


def stacks_in(space: Space) -> list[fx.Node]:
    """The weights with a dim of experts, but for those of the router."""
    return [n for n in space.places if is_parameter(n) and space.dim(n) >= 0 and not _is_of_router(space, n)]


def _is_of_router(space: Space, weight: fx.Node) -> bool:
    """Whether a call from the first product of scores to the choices reads a weight, or scores alone are made of it.
    Those of a layer that is applied again are made of its experts too."""
    calls = set(walk([weight], readers, stop=lambda n: n is not weight and not is_computed_weight(n)))
    return bool(calls & space.scored & space.below) or calls <= space.scored


def _readers_of_weight(node: fx.Node) -> Iterable[fx.Node]:
    """The readers of a weight, through views and lookups by ids."""
    passes = node.op == "placeholder" or node.target in LAID_OUT or lookup(node) is not None
    return node.users if passes else ()


def product_of(call: fx.Node, expert_dim: Callable[[fx.Node], int], ids: Collection[fx.Node] = ()) -> Product | None:
    """A product of a value and a weight; None for others, and if it sums over the experts themselves.
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
            return Product(call, read[1 - at], weight, summed[0][1], made[0][1], _is_by_ids(ids, w))
    return None


def _is_by_ids(ids: Collection[fx.Node], w: fx.Node) -> bool:
    return any(found[2] in ids for n in walk([w], _up_views) if (found := lookup(n)) is not None)


def _up_views(node: fx.Node) -> Iterable[fx.Node]:
    return [n for n in node.all_input_nodes if n.meta["val"].dtype.is_floating_point] if is_view(node) else ()


def ends(products: list[Product], above: set[fx.Node]) -> tuple[list[Product], list[Product]]:
    """Those that no other of them comes before, and those that none comes after."""
    nodes = {p.node for p in products}
    before = {p.node: _before(p, nodes, above) for p in products}
    followed = set().union(*before.values())
    return [p for p in products if not before[p.node]], [p for p in products if p.node not in followed]


def _before(product: Product, nodes: set[fx.Node], above: set[fx.Node]) -> set[fx.Node]:
    return nodes & set(walk([product.x], operands, into=lambda n: n not in above))


def weights_of(space: Space, products: list[Product], first: list[Product], last: list[Product]) -> list[ExpertWeight]:
    """The stacks that products read, then other weights with a value for each expert, such as biases."""
    found: dict[fx.Node, ExpertWeight] = {}
    for product in products:
        w = product.weight
        found[w] = ExpertWeight((w.name,), shape_of(w), space.dim(w), *sides(product, first, last))
    for w in sorted(stacks_in(space)):
        found.setdefault(w, ExpertWeight((w.name,), shape_of(w), space.dim(w)))
    return list(found.values())


def sides(product: Product, first: list[Product], last: list[Product]) -> tuple[int, int, str]:
    """The dims of its weight for the model's and an expert's own features, and the style of a cut of the latter."""
    if (product in first) == (product in last):
        return -1, -1, ""
    return (product.summed, product.made, "column") if product in first else (product.made, product.summed, "row")
