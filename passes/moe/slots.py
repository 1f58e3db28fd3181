"""Stacks of experts without a matching dim of the router: places of slots are computed from the numbers of experts.

    at = expert · C + place     buffer[at] += rows     buffer[E, C, d] @ W[E, d, h]
    rows[expert, place] = x                            rows[E, C, d] @ W[E, d, h]

Such a buffer, through views, is multiplied with stacks in products that keep one dim of them as a batch dim: the dim of
experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import fx

from passes.moe.ties import lookup
from passes.moe.weights import origin_of
from passes.program.ops.aten import aten, is_pointwise, named, packet_of, tensors_of
from passes.program.ops.groups import CUTS, JOINS, LAID_OUT, PLACING
from passes.program.ops.products import PRODUCTS
from passes.program.walks import readers, walk
from passes.program.weights import is_weight
from passes.rules.call import operands_of
from passes.rules.rule import RESULT
from passes.rules.table import rule_of


def stacks_of_slots(ids: Iterable[fx.Node], size: int, below: Collection[fx.Node]) -> Iterator[tuple[fx.Node, int]]:
    """(weight, dim) of stacks multiplied with slots that are filled by numbers of experts. ``below``: values that
    depend on the router, so a residual ends the path to them.
    """

    def through(node: fx.Node) -> Iterator[fx.Node]:
        return (u for u in node.users if _passes(u) and all(n in below or _is_own(n) for n in u.all_input_nodes))

    numbers = set(walk(ids, readers, into=lambda n: n.op != "output" and not _is_float(n)))
    placed = [u for n in sorted(numbers) for u in n.users if u not in numbers and _is_placed(u, numbers)]
    for product in sorted(u for n in walk(placed, through) for u in n.users if u.target in PRODUCTS):
        yield from kept_apart(product, size)


def kept_apart(product: fx.Node, size: int) -> Iterator[tuple[fx.Node, int]]:
    """(weight, dim) of ``size`` that a product keeps apart: it is a dim of both operands, and of the result."""
    rule, read = rule_of(product), operands_of(product)
    if rule is None:
        return
    for factor in rule.factors:
        if factor.size == size and all(factor.at(i) is not None for i in (RESULT, *range(len(read)))):
            inside = [p for p in factor.places if p.operand != RESULT and rule.sole(p.operand, p.dim) is factor]
            origins = [origin_of(read[p.operand], p.dim) for p in inside]
            yield from (origin for origin in origins if origin is not None)


def _is_placed(call: fx.Node, numbers: set[fx.Node]) -> bool:
    """Whether a call puts or picks values at places that ``numbers`` say."""
    if call.op != "call_function" or not _is_float(call):
        return False
    found, given = lookup(call), named(call)
    if found is not None:
        return found[2] in numbers and not is_weight(found[0])
    if call.target in PLACING or packet_of(call.target) in (aten.gather, aten.index):
        index = given.get("index", given.get("indices"))
        return any(n in numbers for n in (index if isinstance(index, list | tuple) else [index]))
    return False


def _passes(call: fx.Node) -> bool:
    return call.target in LAID_OUT | JOINS | CUTS or is_pointwise(call.target)


def _is_own(node: fx.Node) -> bool:
    """Whether it is no value of tokens: a weight, or made of numbers alone."""
    return is_weight(node) or not node.all_input_nodes


def _is_float(node: fx.Node) -> bool:
    value = next(tensors_of(node), None)
    return value is None or value.dtype.is_floating_point
