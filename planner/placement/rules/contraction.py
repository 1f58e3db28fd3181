"""Products that sum over shared labels: linear, mm, bmm, matmul and einsum are one rule.

Write the product as an einsum. Over tp one label may be cut:

    a label of the output    every operand that has it is cut there, the others are R       column parallel, heads
    a summed label           both operands are cut there, the result is P                   row parallel

The weight of a column-parallel linear is cut exactly as its output, segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from string import ascii_letters

import torch
from torch import fx

from planner.placement.rules.base import Option, Site
from planner.placement.types import P, Placement, Segment

aten = torch.ops.aten


def contraction(site: Site) -> Iterator[Option]:
    """Options of a two- or many-operand product."""
    labelled = equation(site.node)
    if labelled is None:
        return
    operands, labels, out = labelled
    if len(set(operands)) != len(operands):
        return
    for label in dict.fromkeys("".join(labels)):
        yield from _cut_label(site, operands, labels, out, label)


def grouped(site: Site) -> Iterator[Option]:
    """grouped_mm(x[t, i], W[e, i, o], offsets): the rows of each expert times its matrix; i or o may be cut."""
    x, weight = site.node.args[:2]
    if (
        isinstance(x, fx.Node)
        and isinstance(weight, fx.Node)
        and x is not weight
        and len(site.inputs) < 4
        and len(site.shape(x)) == 2
        and len(site.shape(weight)) == 3
    ):
        for label in "YZ":
            yield from _cut_label(site, [x, weight], ["TZ", "EZY"], "TY", label)


def _cut_label(site: Site, operands: list[fx.Node], labels: list[str], out: str, label: str) -> Iterator[Option]:
    attends = not any(is_made_of_weights(n) for n in operands)
    for segments, padding in _segmentations(site, operands, labels, out, label):
        given = {
            n: Placement("V", w.index(label), segments, padding)
            for n, w in zip(operands, labels, strict=True)
            if label in w
        }
        if label in out:
            yield site.option(Placement("V", out.index(label), segments, padding), given, "column", attends=attends)
        elif not padding and all(s.sharded for s in segments):
            yield site.option(P, given, "row", attends=attends)


def _segmentations(
    site: Site, operands: list[fx.Node], labels: list[str], out: str, label: str
) -> list[tuple[tuple[Segment, ...], int]]:
    """Ways to cut a label that someone asks for; a feature label of a weight is offered plainly too."""
    found = {
        (c.segments, c.padding)
        for n, w in zip(operands, labels, strict=True)
        if label in w
        for c in site.candidates(n)
        if c.dim == w.index(label)
    }
    if label in out:
        found |= {(c.segments, c.padding) for c in site.candidates() if c.dim == out.index(label)}
    for node, word in zip(operands, labels, strict=True):
        size = site.shape(node)[word.index(label)] if label in word else 0
        if size and is_made_of_weights(node) and site.divides(size):
            found.add(((Segment(size),), 0))
    return sorted(found)


def holds_weight(node: fx.Node) -> bool:
    """Whether the value is a parameter, or one seen through reshapes, permutes and casts."""
    while node.op == "call_function" and node.target in SEE_THROUGH:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and bool(node.meta.get("parameter"))


def is_made_of_weights(node: fx.Node) -> bool:
    """Whether the value is a weight so seen, or several of them stacked, or a part of such a stack."""
    if node.op == "call_function" and node.target in {*SEE_THROUGH, aten.cat.default, aten.slice.Tensor}:
        return all(is_made_of_weights(n) for n in node.all_input_nodes)
    return holds_weight(node)


SEE_THROUGH = {aten.reshape.default, aten.permute.default, aten.to.dtype, aten.contiguous.default}


def equation(node: fx.Node) -> tuple[list[fx.Node], list[str], str] | None:
    """Operands, their labels and the output's labels; None for a form that is not an explicit einsum over tensors."""
    if node.target is aten.einsum.default:
        return _einsum(node)
    a, b = node.args[0], node.args[1]
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return None
    m, n = a.meta["val"].dim(), b.meta["val"].dim()
    if node.target is aten.linear.default:
        batch = ascii_letters[: m - 1]
        return [a, b], [batch + "Z", "YZ"[-n:]], batch + "Y"[: n - 1]
    if m == 1 or n == 1:
        return _with_vector(a, b, m, n)
    return _batched(a, b)


def _with_vector(a: fx.Node, b: fx.Node, m: int, n: int) -> tuple[list[fx.Node], list[str], str]:
    left, right = ascii_letters[: m - 1], ascii_letters[20 : 20 + max(n - 2, 0)]
    return [a, b], [left + "Z", right + ("ZY" if n > 1 else "Z")], left + right + ("Y" if n > 1 else "")


def _batched(a: fx.Node, b: fx.Node) -> tuple[list[fx.Node], list[str], str] | None:
    """[.., X, Z] @ [.., Z, Y]; a batch dim of size 1 that is broadcast gets a label of its own."""
    sa, sb = list(a.meta["val"].shape), list(b.meta["val"].shape)
    batch = max(len(sa), len(sb)) - 2
    la, lb, out = "", "", ""
    for d in range(batch):
        ia, ib = d - (batch - (len(sa) - 2)), d - (batch - (len(sb) - 2))
        na, nb = (sa[ia] if ia >= 0 else 0), (sb[ib] if ib >= 0 else 0)
        label = ascii_letters[d]
        full = max(na, nb)
        out += label
        la += "" if not na else label if na == full else ascii_letters[10 + d]
        lb += "" if not nb else label if nb == full else ascii_letters[10 + d]
    return [a, b], [la + "XZ", lb + "ZY"], out + "XY"


def _einsum(node: fx.Node) -> tuple[list[fx.Node], list[str], str] | None:
    text = str(node.args[0]).replace(" ", "")
    operands = node.args[1]
    if "->" not in text or "..." in text or not isinstance(operands, (list, tuple)):
        return None
    left, out = text.split("->")
    labels = left.split(",")
    nodes = [n for n in operands if isinstance(n, fx.Node)]
    repeated = any(len(set(w)) != len(w) for w in labels)
    if repeated or len(nodes) != len(labels):
        return None
    sizes = {(c, n) for x, w in zip(nodes, labels, strict=True) for c, n in zip(w, x.meta["val"].shape, strict=True)}
    broadcast = len(sizes) != len({c for c, _ in sizes})
    return None if broadcast else (nodes, labels, out)
