"""Groups of ops, each defined once. ``node.target in RESHAPES`` holds for all overloads of an op.

Products are einsums; a label of the result is kept, any other is summed over. Canonical form leaves these five ops and
no other product.

    linear(x[.., i], W[o, i])      "abZ,YZ->abY"            mm, bmm, matmul     "aXZ,aZY->aXY"
"""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_letters
from typing import Any

from torch import fx

from passes.program.ops.aten import aten, ops_named, packet_of
from passes.program.ops.sequence import causal_attention, gathered_attention


class Ops:
    """Ops with all their overloads. Those that this PyTorch lacks are left out."""

    def __init__(self, names: str, more: Iterable[Any] = ()) -> None:
        self.packets = frozenset(getattr(aten, n) for n in names.split() if hasattr(aten, n)) | frozenset(more)

    def __contains__(self, target: object) -> bool:
        return packet_of(target) in self.packets

    def __or__(self, other: Ops) -> Ops:
        return Ops("", self.packets | other.packets)


# ---- the same elements

CASTS = Ops("to _to_copy type_as")
COPIES = Ops("contiguous clone")
SAME = CASTS | COPIES | Ops("alias detach lift_fresh lift_fresh_copy")
RESHAPES = Ops("view reshape _unsafe_view flatten unflatten unsqueeze squeeze view_as reshape_as ravel")
PERMUTES = Ops("permute transpose t movedim moveaxis swapaxes swapdims numpy_T mT")
LAID_OUT = SAME | RESHAPES | PERMUTES | Ops("expand expand_as")
VIEWS = Ops("reshape permute expand")  # those that canonical form leaves
WITH_SIZES = Ops("reshape expand")  # of these, the ones that take sizes as arguments

# ---- elements put elsewhere

JOINS = Ops("cat concat concatenate")
CUTS = Ops("slice narrow select")
SPLITS = Ops("split split_with_sizes chunk unbind")
ADDING = Ops("scatter_add scatter_reduce index_add")  # to what is there
PLACING = ADDING | Ops("scatter index_copy index_put")
VALUED = Ops("zeros_like ones_like full_like new_zeros new_ones new_full")  # one known value, of a shape
FILLED = VALUED | Ops("empty_like new_empty")
LOOKUPS = Ops("index index_select gather")  # at positions that an operand names
PADS = Ops("pad constant_pad_nd")
MOVED = LAID_OUT | CUTS  # the same elements, or some of them
MOVES = LAID_OUT | JOINS | PADS | Ops("slice slice_scatter split_with_sizes roll flip")  # in a capture

# ---- arithmetic

WITH_WEIGHT = Ops("linear mm addmm")  # products of two matrices: an activation and a weight, as a rule
CONVOLUTIONS = Ops("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d")
ATTENTION = Ops("scaled_dot_product_attention", (causal_attention, gathered_attention))
CROSS_ENTROPIES = Ops("cross_entropy_loss nll_loss_nd nll_loss nll_loss2d")
LOG_SOFTMAXES = Ops("log_softmax _log_softmax")
SOFTMAXES = Ops("softmax _softmax _safe_softmax")
EXTREMES = Ops("amax amin")
SORTS = Ops("sort argsort")
BEST = Ops("topk max argmax")  # along a dim, with their indices
BINS = Ops("one_hot histc bincount")  # made of numbers, a place for each
CHOICES = Ops("where masked_fill")
ANDS = Ops("__and__ bitwise_and logical_and")
ORS = Ops("__or__ bitwise_or logical_or")
DIVISIONS = Ops("div divide true_divide")


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
