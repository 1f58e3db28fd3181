"""What one node costs: floating-point operations of products, bytes that everything else moves. Read off the shapes.

    linear, mm, bmm, matmul     2 · (elements of the result) · (length of the contracted dim)
    attention                   2 · b · h · s_q · s_k · (d + d_v)      (all of it, causal or not: the convention)
    convolution                 2 · (elements of the result) · (weights that one of them reads)
    embedding, elementwise, …   0 operations; bytes = what it reads + what it writes

Forward, for one microbatch and the whole (unsharded) tensors. Backward is about twice that, for every node alike, so
that shares and balances may leave it out.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# How many operations a processor does in the time in which it moves one byte: about right for a CPU core in float32.
# What matters here is the share of the memory-bound ops, a few per cent of a block; a cluster file knows better.
FLOPS_PER_BYTE = 8.0


def node_flops(node: fx.Node) -> int:
    """Multiplications and additions of one forward call of ``node``; 0 for what is not a product."""
    if node.op != "call_function":
        return 0
    rule = _FLOPS.get(_packet(node))
    if rule is not None:
        return rule(node)
    return _product(node) if "grouped_mm" in str(node.target) else 0


def node_bytes(node: fx.Node) -> int:
    """Bytes that one forward call reads and writes; 0 for views and placeholders."""
    if node.op != "call_function" or is_view(node):
        return 0
    written = value_bytes(node)
    if _packet(node) is aten.embedding:
        return 2 * written + value_bytes(node.all_input_nodes[0])  # the gradient of the whole table is written
    return written + sum(value_bytes(n) for n in node.all_input_nodes)


def node_cost(node: fx.Node, flops_per_byte: float = FLOPS_PER_BYTE) -> int:
    """One number to balance by, in operations: a product costs its operations, anything else what it moves."""
    flops = node_flops(node)
    return flops if flops else int(node_bytes(node) * flops_per_byte)


def value_bytes(node: fx.Node) -> int:
    """Bytes of a node's value (of all its tensors, for a tuple)."""
    return sum(t.numel() * t.element_size() for t in tensors_of(node))


def tensors_of(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors of a node's value."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    yield from (v for v in values if isinstance(v, torch.Tensor))


def is_view(node: fx.Node) -> bool:
    """Whether the result shares the memory of an argument: PyTorch's schema says so, and no conversion happens."""
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return False
    before, after = next(tensors_of(node.all_input_nodes[0]), None), next(tensors_of(node), None)
    return before is not None and after is not None and before.dtype == after.dtype


def is_random(node: fx.Node) -> bool:
    """Whether two calls may give different values."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and not _is_dropless_attention(node)


def _is_dropless_attention(node: fx.Node) -> bool:
    """Attention is tagged random for its dropout, which is mostly 0."""
    return _packet(node) is aten.scaled_dot_product_attention and not _argument(node, 4, "dropout_p", 0.0)


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _shape(value: Any) -> tuple[int, ...]:
    """Shape of a node's (first) tensor."""
    return tuple(int(n) for n in next(tensors_of(value)).shape)


def _numel(value: Any) -> int:
    return math.prod(_shape(value))


def _product(node: fx.Node) -> int:
    """[…, k] times [k, …]: the first operand's last dim is contracted."""
    return 2 * _numel(node) * _shape(node.args[0])[-1]


def _product_after_bias(node: fx.Node) -> int:
    return 2 * _numel(node) * _shape(node.args[1])[-1]


def _bilinear_attention(node: fx.Node) -> int:
    query, key, value = (_shape(_argument(node, i, n)) for i, n in enumerate(("query", "key", "value")))
    batch_heads = math.prod(query[:-2])
    return 2 * batch_heads * query[-2] * key[-2] * (query[-1] + value[-1])


def _convolution(node: fx.Node) -> int:
    weight = _shape(node.args[1])
    transposed = bool(_argument(node, 6, "transposed", False)) if _packet(node) is aten.convolution else False
    if transposed or "transpose" in str(node.target):
        return 2 * _numel(node.args[0]) * math.prod(weight[1:])
    return 2 * _numel(node) * math.prod(weight[1:])


def _einsum(node: fx.Node) -> int:
    """Operands are taken in from left to right; each product loops over all letters then in play."""
    equation, operands = node.args[0], node.args[1]
    assert isinstance(equation, str)
    assert isinstance(operands, (tuple, list))
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_letters(term, len(_shape(x))) for term, x in zip(left.split(","), operands, strict=True)]
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, _shape(operand), strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    result = set(_letters(right, len(_shape(node)))) if arrow else {c for c in sizes if left.count(c) == 1}
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
    aten.scaled_dot_product_attention: _bilinear_attention,
    aten.einsum: _einsum,
}
