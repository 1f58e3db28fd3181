"""An RMS norm that the model spells out becomes ``aten.rms_norm``, if it is the same formula (``fuse_norms: true``).

    v · rsqrt(mean(v², last dim) + eps)                          v of float32 or float64     rms_norm(v, [h], None, eps)
    to(to(x, float32) · rsqrt(mean(to(x, float32)²) + eps), x)   x of half precision         rms_norm(x, [h], None, eps)

PyTorch computes a norm of half precision in float32 and rounds once, as the second line does; so one that is computed
in half precision throughout stays. So does a division by a root, as a product with rsqrt rounds otherwise, and v · v,
with a gradient that is added in another order than that of v². The weight is left outside, in the precision in which
the model multiplies by it. On a CPU ops and bits are the same; a GPU has one kernel for each direction in place of
seven and some twenty, which sums in another order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.program.builder import Builder, prune
from passes.program.ops.aten import HALF, aten, packet_of, shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of

_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class SpelledNorm:
    """``results`` are the norm of ``x`` over its last dim; ``num_ops`` calls compute it."""

    x: fx.Node
    eps: float
    results: tuple[fx.Node, ...]
    num_ops: int


def spelled_norms(program: Program) -> Iterator[SpelledNorm]:
    """Yield all that the program spells out, in its order."""
    for node in program.graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if (found := _norm_of(node)) is not None:
            yield found


def fuse_norms(program: Program) -> None:
    """Rewrite them in place; ``program.rewrites`` lists them."""
    found = list(spelled_norms(program))
    for norm in found:
        for result in norm.results:
            build, args = Builder(program.graph.graph, result, result), (norm.x, [shape_of(norm.x)[-1]], None, norm.eps)
            new = build.call(aten.rms_norm.default, *args, val=result.meta["val"], grad=result.meta["grad"])
            result.replace_all_uses_with(new)
        line = where_of(norm.results[0])
        program.rewrites.append((f"an RMS norm in {norm.num_ops} ops is aten.rms_norm (fuse_norms)", line))
    if found:
        prune(program.graph.graph)


def _norm_of(product: fx.Node) -> SpelledNorm | None:
    if product.kwargs or not all(isinstance(a, fx.Node) for a in product.args):
        return None
    args: Any = product.args
    for v, root in (args, args[::-1]):
        eps, made, given = _eps_of(v, root), product.meta["val"], v.meta["val"]
        if eps is None or (made.shape, made.dtype) != (given.shape, given.dtype):
            continue
        found = SpelledNorm(v, eps, (product,), 5)
        if v.target is aten.to.dtype and given.dtype == torch.float32 and len(v.args) == 2 and not v.kwargs:
            return _with_casts(v, product, eps) or found
        return found if given.dtype in _WIDE else None
    return None


def _with_casts(v: fx.Node, product: fx.Node, eps: float) -> SpelledNorm | None:
    """Return the norm of a value that is cast to float32 for the norm alone, and is cast back to its own dtype."""
    (x,) = v.all_input_nodes
    given = x.meta["val"].dtype
    back = tuple(product.users)
    is_back = all(u.target is aten.to.dtype and u.args[1:] == (given,) and not u.kwargs for u in back)
    own = all(user is product or _is_square(user, v) for user in v.users)
    return SpelledNorm(x, eps, back, 7) if given in HALF and back and is_back and own else None


def _eps_of(v: fx.Node, root: fx.Node) -> float | None:
    """Return eps, if ``root`` is rsqrt(mean(v², last dim, kept) + eps) and the values between have no other readers."""
    if root.target is not aten.rsqrt.default or len(root.users) != 1:
        return None
    added: Any = root.args[0]
    if packet_of(added.target) is not aten.add or len(added.args) != 2 or added.kwargs or not _is_inner(added, v):
        return None
    mean, eps = added.args
    if not isinstance(mean, fx.Node) or isinstance(eps, bool) or not isinstance(eps, (int, float)):
        return None
    if mean.target is not aten.mean.dim or mean.kwargs or not _is_inner(mean, v):
        return None
    (square, dims, *kept), ndim = mean.args, v.meta["val"].dim()
    is_last = isinstance(dims, Sequence) and len(dims) == 1 and ndim > 0 and dims[0] in (-1, ndim - 1)
    if not isinstance(square, fx.Node) or not is_last or kept != [True]:
        return None
    return float(eps) if _is_square(square, v) and _is_inner(square, v) else None


def _is_square(node: fx.Node, v: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return node.args == (v, 2)
    return node.target is aten.square.default and node.args == (v,)


def _is_inner(node: fx.Node, v: fx.Node) -> bool:
    """Return whether it has one reader, and the dtype of ``v``."""
    return len(node.users) == 1 and node.meta["val"].dtype == v.meta["val"].dtype
