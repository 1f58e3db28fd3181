"""The path of a token through a layer of experts: their input, how tokens reach it, and the combined result.

tokens → (sorted, put into slots, copied) → first products … last products → times probs → summed: combined
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from passes.moe.layers import Dispatch
from passes.moe.products import Product
from passes.moe.space import Space
from passes.moe.ties import is_grouped, is_product, lookup
from passes.program.ops.aten import aten, named, packet_of, shape_of, tensors_of
from passes.program.ops.groups import ADDING, BINS, FILLED, JOINS, LAID_OUT, PLACING, SORTS
from passes.program.walks import ancestors, meetings, operands, readers, walk
from passes.program.weights import is_weight
from passes.rules.rule import RESULT
from passes.rules.table import rule_of

MOST = 200


def base(node: fx.Node, space: Space | None = None) -> fx.Node:
    """The base of a view; with a space also the source of sorted or copied rows."""
    while node.op == "call_function":
        found = lookup(node) if space is not None else None
        found = None if found is not None and space is not None and is_weight(found[0]) else found
        if node.target not in LAID_OUT and (found is None or found[2] in (space.ids if space else ())):
            break
        node = found[0] if found is not None else node.all_input_nodes[0]
    return node


def is_float(node: fx.Node) -> bool:
    value = next(tensors_of(node), None)
    return value is not None and value.dtype.is_floating_point


def tokens_of(space: Space, first: Iterable[fx.Node]) -> list[fx.Node]:
    """The values that experts read and their router did not make: one, if all is understood."""
    found = dict.fromkeys(base(node, space) for node in _frontier(space, first))
    read = [n for n in found if n not in space.below]
    return [n for n in read if not _is_made_of_others(n, set(read) - {n})]


def _is_made_of_others(node: fx.Node, others: set[fx.Node]) -> bool:
    """Whether a value is computed from another that experts read, by no weights."""
    above = set(walk([node], operands, stop=lambda n: n in others))
    return bool(above & others) and all(n in others or n.op == "call_function" for n in above)


def _frontier(space: Space, first: Iterable[fx.Node]) -> Iterable[fx.Node]:
    def within(node: fx.Node) -> bool:
        return node in space.below or bool(space.places.get(node))

    def ends(node: fx.Node) -> bool:
        """Beyond a product of scores are values that the router reads, which may be others than experts do."""
        return not within(node) or is_weight(node) or (node in space.scored and is_product(node))

    for node in walk(first, operands, stop=ends):
        is_made = node.op == "placeholder" or bool(node.all_input_nodes)
        if not (within(node) or is_weight(node)) and is_float(node) and is_made and node.target not in FILLED:
            yield node


def dispatch_of(space: Space, first: list[Product], tokens: fx.Node) -> tuple[Dispatch, int]:
    """How tokens come to the first products, and the slots of each expert."""
    if any(is_grouped(p.node) for p in first):
        return Dispatch.OFFSETS, 0
    if any(p.by_ids for p in first):
        return Dispatch.GATHERED, 0
    way = carrying(space, tokens, [p.x for p in first])
    if any(is_product(n) or lookup(n) or _places(n) for n in way):
        hidden = shape_of(first[0].weight)[first[0].summed]
        return Dispatch.CAPACITY, first[0].x.meta["val"].numel() // (space.size * hidden)
    return Dispatch.EVERY_TOKEN, 0


def _places(node: fx.Node) -> bool:
    return node.target in PLACING or packet_of(node.target) in (aten.gather, aten.sum)


def is_taken(node: fx.Node, space: Space) -> bool:
    """Whether it holds the rows that each expert took of the shared input: by lookup, or by a product with one-hots."""
    node, found = base(node), lookup(base(node))
    if found is not None:
        return base(found[2]) in space.chosen and not space.places.get(found[0])
    marks = [base(n) for n in node.all_input_nodes] if is_product(node) else []
    return any(packet_of(n.target) is aten.one_hot and base(n.all_input_nodes[0]) in space.chosen for n in marks)


def carrying(space: Space, tokens: fx.Node, ends: Collection[fx.Node]) -> set[fx.Node]:
    """Values on the way from the tokens to ``ends``, except those that the router uses for scores."""
    above = ancestors(ends)

    def goes_on(node: fx.Node) -> bool:
        return node in above and not (node in space.scored and is_product(node))

    return {n for n in walk([tokens], readers, into=goes_on) if n is not tokens}


def combined_of(space: Space, last: Collection[fx.Node], tokens: fx.Node, joins: bool = False) -> fx.Node | None:
    """The first sum after the last products that has the tokens' size again and no dim of experts. ``joins``: a sum of
    two may be it."""
    for node in meetings(last, most=MOST + 12 * len(last)):
        if node not in last and _is_whole_again(space, node, tokens, joins):
            return node
    return None


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
    """Routing weights: floats of the router that multiply ``carried`` values, at a call on the ``way``."""
    found: dict[fx.Node, None] = {}
    for node in sorted(way):
        read = node.all_input_nodes if packet_of(node.target) is aten.mul or is_product(node) else []
        others = [n for n in read if n not in carried and is_float(n) and n in space.below]
        if any(n in carried for n in read):
            bases = [base(n, space) for n in others]
            found |= dict.fromkeys(b for b in bases if b.op == "call_function" and not is_weight(b))
    return list(found)


def between(start: Iterable[fx.Node], end: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    """Calls after ``start`` up to ``end`` that lead there, and all of them with ``start``."""
    starts = set(start)
    above = {n for n in ancestors([end])}
    after = set(walk(starts, lambda n: [u for u in n.users if u in above]))
    return after - starts, after


def choices_of(space: Space, combined: fx.Node) -> tuple[list[fx.Node], int]:
    """The ids that the layer goes by, and how many they are for each token."""
    above = ancestors([combined])
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
    """The call that chose or combined ids, before they were rearranged, copied or sorted."""
    while node.target not in JOINS:
        above = [n for n in node.all_input_nodes if n in space.ids or packet_of(n.target) is aten.sort]
        if not above:
            break
        node = above[0] if above[0] in space.ids else above[0].all_input_nodes[0]
        if node not in space.ids:
            break
    return node
