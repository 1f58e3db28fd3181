"""Products as einsums.

    linear(x[.., i], W[o, i])      "abZ,YZ->abY"            mm, bmm, matmul     "aXZ,aZY->aXY"

A label of the result is kept, any other is summed over. Canonical form leaves these five ops and no other product.
"""

from __future__ import annotations

from string import ascii_letters
from typing import Any

from torch import fx

from passes.program.ops.aten import aten, ops_named
from passes.program.ops.groups import CASTS, COPIES, PERMUTES, RESHAPES

PRODUCTS = frozenset(ops_named("linear mm bmm matmul einsum"))
SEE_THROUGH = RESHAPES | PERMUTES | CASTS | COPIES


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
