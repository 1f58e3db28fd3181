"""The cost of one node: floating-point operations of products, bytes that all other ops move.

    products, convolutions      2 × the sizes of all factors of two operands and the result, as the rule says
    attention                   2 · b · h · s_q · s_k · (d + d_v)      (all of it, causal or not: the convention)
    lstm, gru, rnn              2 · tokens · (elements of all matrices): each multiplies every token once
    ops of a user's own         as their rule says (passes.rules.own), or as a product if trials show that they sum over
                                a dim of two operands
    embedding, elementwise, …   0 operations; bytes = inputs + outputs

Forward, for one microbatch and the full (unsharded) tensors. Backward is about twice that, for every node alike, so
that shares and balances may leave it out.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from torch import fx

from passes.program.ops.aten import arguments, aten, is_view, packet_of, shape_of, value_bytes
from passes.program.ops.groups import is_grouped
from passes.program.ops.sequence import causal_attention, gathered_attention
from passes.rules import products
from passes.rules.own import OwnRule, flops_of_pattern, own_rule
from passes.rules.products import Builder
from passes.rules.rule import RESULT, Factor, operands_of
from passes.rules.table import RULES, builder_of, rule_of

# How many operations a processor does in the time in which it moves one byte: about right for a CPU core in float32.
# Only the share of the memory-bound ops matters here, a few per cent of a block; a cluster file knows better.
FLOPS_PER_BYTE = 8.0

MULTIPLIED: dict[Builder, tuple[int, int]] = {  # builder of a rule → the operands that the op multiplies
    **dict.fromkeys((products.linear, products.matmul, products.grouped), (0, 1)),
    **dict.fromkeys((products.einsum, products.convolution), (0, 1)),
    **dict.fromkeys((products.addmm, products.baddbmm, products.addmv, products.addbmm), (1, 2)),
}


def multiplied(target: Any) -> tuple[int, int] | None:
    """Positions of the operands that a product multiplies; None for an op that is none. Of an einsum the first two."""
    builder = builder_of(target)
    return MULTIPLIED.get(builder) if builder is not None else None


def node_flops(node: fx.Node) -> int:
    """Multiplications and additions of one forward call of ``node``; 0 for other ops."""
    if node.op != "call_function":
        return 0
    if (own := own_rule(node.target)) is not None:
        return own.flops_of(node)
    if (pattern := node.meta.get("inferred")) is not None:
        return OwnRule(str(node.target), str(pattern), pattern, flops_of_pattern(pattern)).flops_of(node)
    flops = FLOPS.get(aten._grouped_mm if is_grouped(node.target) else packet_of(node.target))
    return flops(node) if flops is not None else 0


def has_flops(node: fx.Node) -> bool:
    """Return whether ``node`` is a product, or another op with FLOPs; most are known without their number."""
    packet = packet_of(node.target)
    return (packet in FLOPS and packet is not aten.einsum) or node_flops(node) > 0


def node_bytes(node: fx.Node) -> int:
    """Bytes that one forward call reads and writes; 0 for views and placeholders."""
    if node.op != "call_function" or is_view(node):
        return 0
    written = value_bytes(node)
    if packet_of(node.target) is aten.embedding:
        return 2 * written + value_bytes(node.all_input_nodes[0])  # the gradient of the full table is written
    return written + sum(value_bytes(n) for n in node.all_input_nodes)


def node_cost(node: fx.Node, flops_per_byte: float = FLOPS_PER_BYTE) -> int:
    """One number to balance by, in operations: a product costs its operations, any other op the bytes that it moves."""
    flops = node_flops(node)
    return flops if flops else int(node_bytes(node) * flops_per_byte)


def _of_product(operands: tuple[int, int], node: fx.Node) -> int:
    rule, three = rule_of(node), {RESULT, *operands}
    if rule is None:
        return 0
    return 2 * prod(f.size for f in rule.factors if len(three & {p.operand for p in f.places}) > 1)


def _of_convolution(node: fx.Node) -> int:
    x, weight = (shape_of(n) for n in operands_of(node)[:2])
    places = x if products.is_transposed(node) else shape_of(node)
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


def _attention(node: fx.Node) -> int:
    given = arguments(node)
    is_over_cp = node.target in (causal_attention, gathered_attention)
    operands = node.args[:3] if is_over_cp else [given[n] for n in ("query", "key", "value")]
    query, key, value = (shape_of(n) for n in operands if isinstance(n, fx.Node))
    batch_heads = prod(query[:-2])
    return 2 * batch_heads * query[-2] * key[-2] * (query[-1] + value[-1])


def _recurrence(node: fx.Node) -> int:
    given = arguments(node)
    x = shape_of(given["input"] if "input" in given else given["data"])
    matrices = [shape_of(n) for n in given["params"] if len(shape_of(n)) == 2]
    return 2 * prod(x[:-1]) * sum(map(prod, matrices))


OTHERS = {products.einsum: _of_einsum, products.convolution: _of_convolution}
FLOPS: dict[Any, Callable[[fx.Node], int]] = {
    **{
        packet: OTHERS.get(builder, partial(_of_product, MULTIPLIED[builder]))
        for packet, builder in RULES.items()
        if builder in MULTIPLIED
    },
    **dict.fromkeys((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu), _recurrence),
    **dict.fromkeys((aten.scaled_dot_product_attention, causal_attention), _attention),
    gathered_attention: lambda node: int(node.args[4]) * _attention(node),  # pyright: ignore[reportArgumentType]
}
