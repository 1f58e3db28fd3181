"""The cost of one node: floating-point operations of products, bytes that all other ops move. Read off the shapes.

    products, convolutions      as their rule says (passes.rules.flops)
    attention                   2 · b · h · s_q · s_k · (d + d_v)      (all of it, causal or not: the convention)
    lstm, gru, rnn              2 · tokens · (elements of all matrices): each multiplies every token once
    ops of a user's own         as their rule says (passes.rules.own)
    embedding, elementwise, …   0 operations; bytes = inputs + outputs

Forward, for one microbatch and the full (unsharded) tensors. Backward is about twice that, for every node alike, so
that shares and balances may leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from passes.program.ops.aten import arguments, aten, is_view, packet_of, shape_of, value_bytes
from passes.program.ops.products import is_grouped
from passes.program.ops.sequence import causal_attention, gathered_attention

# How many operations a processor does in the time in which it moves one byte: about right for a CPU core in float32.
# Only the share of the memory-bound ops matters here, a few per cent of a block; a cluster file knows better.
FLOPS_PER_BYTE = 8.0

OF_PRODUCTS: dict[Any, Callable[[fx.Node], int]] = {}  # given by passes.rules.flops: a product's follow from its rule
OF_OWN_OPS: dict[Any, Callable[[fx.Node], int]] = {}  # given with their rules


def node_flops(node: fx.Node) -> int:
    """Multiplications and additions of one forward call of ``node``; 0 for other ops."""
    if node.op != "call_function":
        return 0
    assert OF_PRODUCTS, "passes.rules is not imported"
    packet = packet_of(node.target)
    flops = OF_OWN_OPS.get(packet) or OF_PRODUCTS.get(packet) or _FLOPS.get(packet)
    if flops is None and is_grouped(node.target):
        flops = OF_PRODUCTS[aten._grouped_mm]
    return flops(node) if flops is not None else 0


def has_flops(node: fx.Node) -> bool:
    """Whether ``node`` is a product, or another op with FLOPs; most are known without their number."""
    packet = packet_of(node.target)
    return (packet in OF_PRODUCTS and packet is not aten.einsum) or packet in _FLOPS or node_flops(node) > 0


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


def _attention(node: fx.Node) -> int:
    given = arguments(node)
    is_over_cp = node.target in (causal_attention, gathered_attention)
    operands = node.args[:3] if is_over_cp else [given[n] for n in ("query", "key", "value")]
    query, key, value = (shape_of(n) for n in operands if isinstance(n, fx.Node))
    batch_heads = math.prod(query[:-2])
    return 2 * batch_heads * query[-2] * key[-2] * (query[-1] + value[-1])


def _recurrence(node: fx.Node) -> int:
    given = arguments(node)
    x = shape_of(given["input"] if "input" in given else given["data"])
    matrices = [shape_of(n) for n in given["params"] if len(shape_of(n)) == 2]
    return 2 * math.prod(x[:-1]) * sum(map(math.prod, matrices))


_FLOPS: dict[Any, Callable[[fx.Node], int]] = {
    **dict.fromkeys((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu), _recurrence),
    **dict.fromkeys((aten.scaled_dot_product_attention, causal_attention), _attention),
    gathered_attention: lambda node: int(node.args[4]) * _attention(node),  # pyright: ignore[reportArgumentType]
}
