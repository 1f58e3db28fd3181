"""The dims of an op's operands and results that count the same things.

    y = a + b           y[.., i] with a[.., i] and b[.., i], unless a size is 1
    einsum("ecd,edh->ech")     a label with itself
    y = x.reshape(…)    by the stride with which a part of x's dim counts: [E·t, h] and [E, t, h]

A place is (node, dim, inner): of a dim of n, the index of the thing counted is (i // inner) % size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from operator import getitem

from torch import fx

from planner.graph.ops.aten import aten, is_pointwise, named, ops_named, packet_of, reduced_dims, shape_of, tensors_of
from planner.graph.ops.products import PRODUCTS, equation

Tie = tuple[tuple[fx.Node, int], ...]

ALONG = set(ops_named("softmax.int _softmax log_softmax.int _log_softmax cumsum cumprod layer_norm rms_norm"))
LIKE = {aten.empty_like, aten.rand_like, aten.randn_like, aten.bernoulli, aten.exponential, aten.native_dropout}
REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.max, aten.min, aten.any}
RANKING = {aten.topk, aten.sort, aten.argsort}
PARTING = {aten.slice, aten.cat, aten.concat, aten.split_with_sizes, aten.split, aten.unbind, aten.narrow}


def is_grouped(node: fx.Node) -> bool:
    """Whether it is the product of runs of rows, each with its own matrix: (x[t, i], W[e, i, o], ends[e])."""
    return "grouped_mm" in str(node.target) and len(node.all_input_nodes) == 3


def operands_of(product: fx.Node) -> tuple[list[fx.Node], list[str], str] | None:
    """Operands of a product, their labels, the labels of the result; None for other ops."""
    if is_grouped(product):
        return product.all_input_nodes, ["TZ", "EZY", "E"], "TY"
    return equation(product) if product.target in PRODUCTS else None


def ties(node: fx.Node, ones: bool = False) -> list[Tie]:
    """Dims of a call and of its operands that count the same, position by position. ``ones``: those of size 1 too."""
    if node.op != "call_function" or not node.all_input_nodes:
        return []
    if any(next(tensors_of(n), None) is None for n in (node, *node.all_input_nodes)):
        return []
    pairs = [tie for tie in _ties(node) if len(tie) > 1]
    least = 1 if ones else 2
    return [t for t in pairs if len({shape_of(n)[d] for n, d in t}) == 1 and shape_of(t[0][0])[t[0][1]] >= least]


def _ties(node: fx.Node) -> Iterable[Tie]:
    packet = packet_of(node.target)
    labelled = operands_of(node)
    if labelled is not None:
        return _of_labels(node, *labelled)
    if node.target in ALONG or is_pointwise(node.target) or packet in LIKE or packet is aten.expand:
        return _aligned(node)
    if packet is aten.permute:
        x, dims = node.all_input_nodes[0], named(node)["dims"]
        return [((node, i), (x, d % len(dims))) for i, d in enumerate(dims)]
    if packet in REDUCTIONS:
        return _kept(node, reduced_dims(node), bool(named(node).get("keepdim")))
    if packet in RANKING or packet in PARTING:
        return [t for x in node.all_input_nodes for t in _beside(node, x, int(named(node).get("dim", -1)))]
    if packet is aten.select:
        return _kept(node, frozenset({int(named(node)["dim"]) % len(shape_of(node.all_input_nodes[0]))}), False)
    return _OTHERS[packet](node) if packet in _OTHERS else _of_getitem(node)


def _of_getitem(node: fx.Node) -> Iterable[Tie]:
    parts = node.all_input_nodes[0]
    if node.target is not getitem or len(shape_of(node)) != len(shape_of(parts)):
        return []
    if packet_of(parts.target) in RANKING | PARTING:
        return _beside(node, parts, int(named(parts).get("dim", -1)))
    return _aligned(node)


def _of_labels(node: fx.Node, operands: list[fx.Node], labels: list[str], out: str) -> Iterator[Tie]:
    for label in dict.fromkeys("".join(labels)):
        places = [(x, word.index(label)) for x, word in zip(operands, labels, strict=True) if label in word]
        yield (*places, *([(node, out.index(label))] if label in out else []))


def _aligned(node: fx.Node) -> Iterator[Tie]:
    """From the last dim on; a dim of size 1 that is broadcast counts nothing."""
    ndim = len(shape_of(node))
    for dim, size in enumerate(shape_of(node)):
        places = [(x, dim - ndim + len(shape_of(x))) for x in node.all_input_nodes]
        yield ((node, dim), *((x, d) for x, d in places if d >= 0 and shape_of(x)[d] == size))


def _kept(node: fx.Node, gone: frozenset[int], keepdim: bool) -> Iterator[Tie]:
    x = node.all_input_nodes[0]
    left = [d for d in range(len(shape_of(x))) if keepdim or d not in gone]
    yield from (((node, i), (x, d)) for i, d in enumerate(left) if d not in gone)


def _beside(node: fx.Node, x: fx.Node, dim: int) -> Iterator[Tie]:
    """All dims but the one given, of two tensors that differ there alone."""
    a, b = shape_of(node), shape_of(x)
    if len(a) == len(b):
        yield from (((node, d), (x, d)) for d in range(len(a)) if d != dim % len(a))


def _scatter(node: fx.Node) -> Iterator[Tie]:
    given = named(node)
    dim, others = int(given["dim"]), [given.get("index"), given.get("src")]
    yield from (((node, d), (given["self"], d)) for d in range(len(shape_of(node))))
    for other in others:
        if isinstance(other, fx.Node):
            yield from _beside(node, other, dim)


def _gather(node: fx.Node) -> Iterator[Tie]:
    given = named(node)
    yield from (((node, d), (given["index"], d)) for d in range(len(shape_of(node))))
    yield from _beside(node, given["self"], int(given["dim"]))


def lookup(node: fx.Node) -> tuple[fx.Node, int, fx.Node] | None:
    """(table, its dim, ids) of a call that reads full slices of a table by one tensor of ids."""
    given, packet = named(node), packet_of(node.target)
    if packet is aten.embedding:
        return given["weight"], 0, given["indices"]
    if packet is aten.index_select:
        return given["self"], int(given["dim"]), given["index"]
    if packet is aten.index:
        by = [(i, ids) for i, ids in enumerate(given["indices"]) if ids is not None]
        if len(by) == 1 and by[0][1].meta["val"].dtype.is_floating_point is False:
            return given["self"], by[0][0], by[0][1]
    return None


def _lookup(node: fx.Node) -> Iterator[Tie]:
    found = lookup(node)
    if found is not None:
        table, dim, ids = found
        extra = len(shape_of(ids))
        yield from (((node, dim + i), (ids, i)) for i in range(extra))
        yield from (((node, d if d < dim else d + extra - 1), (table, d)) for d in _all_but(dim, table))


def _all_but(dim: int, x: fx.Node) -> list[int]:
    return [d for d in range(len(shape_of(x))) if d != dim]


def _one_hot(node: fx.Node) -> Iterator[Tie]:
    x = node.all_input_nodes[0]
    yield from (((node, d), (x, d)) for d in range(len(shape_of(x))))


_OTHERS = {
    aten.scatter: _scatter,
    aten.scatter_add: _scatter,
    aten.gather: _gather,
    aten.index: _lookup,
    aten.embedding: _lookup,
    aten.index_select: _lookup,
    aten.one_hot: _one_hot,
}


def across(source: fx.Node, target: fx.Node, dim: int, inner: int, size: int) -> tuple[int, int] | None:
    """The place in ``target`` of a place of ``source``, if one is a reshape of the other; None if it is split."""
    stride = inner * prod(shape_of(source)[dim + 1 :])
    step = 1
    for d, length in reversed(list(enumerate(shape_of(target)))):
        if length > 1 and step <= stride < step * length:
            within, rest = divmod(stride, step)
            return (d, within) if not rest and length % (within * size) == 0 else None
        step *= length
    return None
