"""The cost of one node: floating-point operations of products, bytes that all other ops move. Read off the shapes.

    linear, mm, bmm, matmul     2 · (elements of the result) · (length of the contracted dim)
    attention                   2 · b · h · s_q · s_k · (d + d_v)      (all of it, causal or not: the convention)
    convolution                 2 · (elements of the result) · (weights that one of them reads)
    lstm, gru, rnn              2 · tokens · (elements of all matrices): each multiplies every token once
    ops of a user's own         as their rule says (planner.rules.own)
    embedding, elementwise, …   0 operations; bytes = inputs + outputs

Forward, for one microbatch and the full (unsharded) tensors. Backward is about twice that, for every node alike, so
that shares and balances may leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from planner.graph.ops.aten import arguments, aten, is_view, packet_of, shape_of, value_bytes
from planner.graph.ops.products import is_grouped
from planner.graph.ops.sequence import causal_attention, gathered_attention

# How many operations a processor does in the time in which it moves one byte: about right for a CPU core in float32.
# Only the share of the memory-bound ops matters here, a few per cent of a block; a cluster file knows better.
FLOPS_PER_BYTE = 8.0

OF_OWN_OPS: dict[Any, Callable[[fx.Node], int]] = {}  # given with their rules


def node_flops(node: fx.Node) -> int:
    """Multiplications and additions of one forward call of ``node``; 0 for other ops."""
    if node.op != "call_function":
        return 0
    packet = packet_of(node.target)
    rule = OF_OWN_OPS.get(packet, _FLOPS.get(packet))
    if rule is not None:
        return rule(node)
    return _product(node) if is_grouped(node.target) else 0


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


def _operand(node: fx.Node, position: int) -> Any:
    return node.args[position]


def _numel(node: fx.Node) -> int:
    return math.prod(shape_of(node))


def _product(node: fx.Node) -> int:
    """[…, k] times [k, …]: the first operand's last dim is contracted."""
    return 2 * _numel(node) * shape_of(_operand(node, 0))[-1]


def _product_after_bias(node: fx.Node) -> int:
    return 2 * _numel(node) * shape_of(_operand(node, 1))[-1]


def _bilinear_attention(node: fx.Node) -> int:
    given = arguments(node)
    is_over_cp = node.target in (causal_attention, gathered_attention)
    operands = node.args[:3] if is_over_cp else [given[n] for n in ("query", "key", "value")]
    query, key, value = (shape_of(n) for n in operands if isinstance(n, fx.Node))
    batch_heads = math.prod(query[:-2])
    return 2 * batch_heads * query[-2] * key[-2] * (query[-1] + value[-1])


def _convolution(node: fx.Node) -> int:
    weight = shape_of(_operand(node, 1))
    transposed = packet_of(node.target) is aten.convolution and bool(arguments(node).get("transposed"))
    if transposed or "transpose" in str(node.target):
        return 2 * _numel(_operand(node, 0)) * math.prod(weight[1:])
    return 2 * _numel(node) * math.prod(weight[1:])


def _recurrence(node: fx.Node) -> int:
    given = arguments(node)
    x = shape_of(given["input"] if "input" in given else given["data"])
    matrices = [shape_of(n) for n in given["params"] if len(shape_of(n)) == 2]
    return 2 * math.prod(x[:-1]) * sum(map(math.prod, matrices))


def _einsum(node: fx.Node) -> int:
    """Operands are taken in from left to right; each product loops over all letters then in play."""
    equation, operands = _operand(node, 0), _operand(node, 1)
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_letters(term, len(shape_of(x))) for term, x in zip(left.split(","), operands, strict=True)]
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, shape_of(operand), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    result = set(_letters(right, len(shape_of(node)))) if arrow else {c for c in sizes if left.count(c) == 1}
    flops, held = 0, set(terms[0])
    for i, term in enumerate(terms[1:], start=1):
        held |= set(term)
        flops += 2 * math.prod(sizes[c] for c in held)
        held &= result | {c for later in terms[i + 1 :] for c in later}
    return flops


def _letters(term: str, ndim: int) -> list[str]:
    """The letters of one operand, those of an ellipsis counted from the right as "-1", "-2", …"""
    if "..." not in term:
        return list(term)
    head, tail = term.split("...")
    missing = ndim - len(head) - len(tail)
    return [*head, *(f"-{missing - i}" for i in range(missing)), *tail]


_FLOPS: dict[Any, Callable[[fx.Node], int]] = {
    **dict.fromkeys((aten.linear, aten.mm, aten.bmm, aten.matmul, aten.mv, aten.dot), _product),
    **dict.fromkeys((aten.addmm, aten.baddbmm, aten.addmv, aten.addbmm), _product_after_bias),
    **dict.fromkeys(
        (
            aten.conv1d,
            aten.conv2d,
            aten.conv3d,
            aten.convolution,
            aten.conv_transpose1d,
            aten.conv_transpose2d,
            aten.conv_transpose3d,
        ),
        _convolution,
    ),
    **dict.fromkeys((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu), _recurrence),
    aten.scaled_dot_product_attention: _bilinear_attention,
    causal_attention: _bilinear_attention,
    gathered_attention: lambda node: int(node.args[4]) * _bilinear_attention(node),  # pyright: ignore[reportArgumentType]
    aten.einsum: _einsum,
}
