"""Products as einsums, and the weights in them.

    linear(x[.., i], W[o, i])      "abZ,YZ->abY"            mm, bmm, matmul     "aXZ,aZY->aXY"

A label of the result is kept, any other is summed over. Canonical form leaves these five ops and no other product.
"""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_letters
from typing import Any

from torch import fx

from passes.program.ops.aten import aten, is_random, ops_named, tensors_of
from passes.program.ops.groups import CASTS, COPIES, PERMUTES, RESHAPES

PRODUCTS = frozenset(ops_named("linear mm bmm matmul einsum"))
SEE_THROUGH = RESHAPES | PERMUTES | CASTS | COPIES


def holds_weight(node: fx.Node) -> bool:
    """Whether the value is a parameter, or one seen through reshapes, permutes and casts."""
    while node.op == "call_function" and node.target in SEE_THROUGH:
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and bool(node.meta.get("parameter"))


def is_made_of_weights(node: fx.Node) -> bool:
    """Whether the value is a weight so seen, or several of them stacked, or a part of such a stack."""
    if node.op == "call_function" and (
        node.target in SEE_THROUGH or node.target in (aten.cat.default, aten.slice.Tensor)
    ):
        return all(is_made_of_weights(n) for n in node.all_input_nodes)
    return holds_weight(node)


def computed_of_weights(nodes: Iterable[fx.Node], least_dims: int = 0) -> frozenset[str]:
    """Calls that read parameters of so many dims, or results of such calls, and beside them only known floats: a cast
    or normed weight, or one of low rank added to it.

    ``nodes``: in the order of the graph.
    """
    parameters, made, known = set[str](), set[str](), set[str]()
    for node in nodes:
        read = [n.name for n in node.all_input_nodes] if node.op == "call_function" else []
        if node.meta.get("parameter"):
            if node.meta["val"].dim() >= least_dims:
                parameters.add(node.name)
        elif _is_known(node) or (read and known.issuperset(read)):
            known.add(node.name)
        elif read and all(n in parameters or n in made or n in known for n in read):
            made.add(node.name)
    return frozenset(made)


def _is_known(node: fx.Node) -> bool:
    """Whether it is a buffer or a constant of floats, or a call that fills a tensor with some."""
    is_filled = node.op == "call_function" and not node.all_input_nodes and not is_random(node)
    return (is_filled or bool(node.meta.get("known"))) and all(x.dtype.is_floating_point for x in tensors_of(node))


def is_grouped(target: Any) -> bool:
    """Whether an op is a grouped product: that of transformers, without the kernel, too."""
    return "grouped_mm" in str(target)


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
