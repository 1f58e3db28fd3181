"""FLOPs of a product, read off its rule: 2 × the sizes of its factors, each index by itself and each that is summed.

linear(x[b, s, i], W[o, i])     2 · b · s · o · i: each factor is in two of the operands and the result
convolution                     and the kernel, at each position of the result (transposed: of the input)
einsum                          operands are taken in from left to right, each product over all factors then in play
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from torch import fx

from passes.program.ops.aten import shape_of
from passes.program.ops.flops import OF_PRODUCTS
from passes.rules import products, spatial
from passes.rules.call import operands_of
from passes.rules.products import Builder
from passes.rules.rule import RESULT, Factor
from passes.rules.table import RULES, builder_of, rule_of

MULTIPLIED: dict[Builder, tuple[int, int]] = {  # builder of a rule → the operands that the op multiplies
    **dict.fromkeys((products.linear, products.matmul, products.grouped, products.einsum, spatial.convolution), (0, 1)),
    **dict.fromkeys((products.addmm, products.baddbmm, products.addmv, products.addbmm), (1, 2)),
}


def multiplied(target: Any) -> tuple[int, int] | None:
    """Positions of the operands that a product multiplies; None for an op that is none. Of an einsum the first two."""
    builder = builder_of(target)
    return MULTIPLIED.get(builder) if builder is not None else None


def _of_product(operands: tuple[int, int], node: fx.Node) -> int:
    rule, three = rule_of(node), {RESULT, *operands}
    if rule is None:
        return 0
    return 2 * prod(f.size for f in rule.factors if len(three & {p.operand for p in f.places}) > 1)


def _of_convolution(node: fx.Node) -> int:
    x, weight = (shape_of(n) for n in operands_of(node)[:2])
    places = x if spatial.is_transposed(node) else shape_of(node)
    return _of_product((0, 1), node) * prod(weight[2:]) * prod(places[2 - len(weight) :])


def _of_einsum(node: fx.Node) -> int:
    rule, num = rule_of(node), len(operands_of(node))
    if rule is None:
        return 0

    def of(*operands: int) -> set[Factor]:
        return {f for f in rule.factors for o in operands if f.at(o) is not None}

    flops, held = 0, of(0)
    for i in range(1, num):
        held |= of(i)
        flops += 2 * prod(f.size for f in held)
        held &= of(RESULT, *range(i + 1, num))
    return flops


OTHERS = {products.einsum: _of_einsum, spatial.convolution: _of_convolution}
OF_PRODUCTS.update(
    (packet, OTHERS.get(builder, partial(_of_product, MULTIPLIED[builder])))
    for packet, builder in RULES.items()
    if builder in MULTIPLIED
)
