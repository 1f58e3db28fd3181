"""Groups of ops, each defined once. ``node.target in RESHAPES`` holds for all overloads of an op.

Of products canonical form leaves the five of ``PRODUCTS`` alone; each is an einsum (passes.rules.table.equation).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    """Return whether an op is a grouped product: that of transformers, without the kernel, too."""
    return "grouped_mm" in str(target)
