"""Attention (and products) of one cp rank's tokens, by kernels that return log-sum-exps or not, to keys of all ranks.

Causal, in parts, each without a mask; of chunk c the keys before it, all of them, and its own keys: causal, a square.
They are merged (passes.ops.flash).

``gathered_attention`` gets this rank's keys and values, gathers both in one exchange, and again in the backward: no
rank saves those of the full sequence. Their gradients are summed over the ranks in one exchange too, in their own
dtype. Without a kernel that returns log-sum-exps, the backward recomputes attention, too.

``of_gathered`` is a product that likewise saves only this rank's part of an operand:

    y = a @ b          b: gathered along the sequence, then rearranged        saved: a, and this rank's part of b
    ga = g @ bᵀ        b is gathered again
    gb = aᵀ @ g        rearranged back, and reduce-scattered
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.context import gathered, gathered_together, scattered_sum, scattered_sums
from passes.ops.documents import MaskRows, attention_by_documents
from passes.ops.flash import CUDNN, FLASH, AttentionCall, AttentionPart, Result, attended, attended_backward, takes
from passes.partition.sequence import facts

Step = tuple[Callable[..., Tensor], Sequence[Any]]


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    axis: AxisHandle,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    documents: int = 0,
    kernel: str = FLASH,
    rows: MaskRows | None = None,
    inputs: Sequence[Tensor] = (),
) -> Tensor:
    """q [b, h, s/cp, d], k and v [b, g, t/cp, d] of this rank → [b, h, s/cp, d]; ``mask`` [.., s/cp, t], no gradient.

    ``is_causal``: there is no mask, and s = t. ``documents``: if not 0, as of ``attention_by_documents``, with
    ``rows`` and ``inputs``. ``kernel``: one of ``KERNELS``; flash where it takes the operands, cuDNN always.
    """
    function = _InParts if is_in_parts(q, k, v, mask, kernel) and not documents else _Again
    how = _How(scale, is_causal, True, kernel, enable_gqa, documents, rows, inputs)
    return function.apply(q, k, v, mask, axis, how)


def is_in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str) -> bool:
    return kernel == CUDNN or takes(q, k, v, mask)


def attend_in_parts(q: Tensor, k: Tensor, v: Tensor, axis: AxisHandle, scale: float | None, kernel: str) -> Tensor:
    """Causal attention, by one of ``KERNELS``, to keys and values that are gathered: k and v [b, g, s, d]."""
    return _InParts.apply(q, k, v, None, axis, _How(scale, True, False, kernel))


def masked_causal_attention(q: Tensor, k: Tensor, v: Tensor, axis: AxisHandle, **options: Any) -> Tensor:
    """Return the same by plain attention, with its ``options``: a mask for each chunk, of its rows and the keys that
    they may see."""
    found = []
    for rows, (start, end) in zip(q.chunk(2, 2), facts.rows(k.shape[2], axis.size, axis.rank), strict=True):
        keys = torch.arange(end, device=q.device)
        operands = (rows, k.narrow(2, 0, end), v.narrow(2, 0, end), keys[start:].view(-1, 1) >= keys)
        found.append(F.scaled_dot_product_attention(*operands, **options))
    return torch.cat(found, 2)


def parts_of(size: int, axis: AxisHandle, is_causal: bool) -> Iterator[list[AttentionPart]]:
    """Yield for each of a rank's two chunks its parts; without causal, one part of all. ``size``: keys of all ranks."""
    if not is_causal:
        yield [AttentionPart(slice(None), slice(None))]
        return
    first = 0
    for start, end in facts.rows(size, axis.size, axis.rank):
        rows = slice(first, first + end - start)
        own = AttentionPart(rows, slice(start, end), True)
        yield [AttentionPart(rows, slice(0, start)), own] if start else [own]
        first = rows.stop


class _How(NamedTuple):
    """``gathers``: whether keys and values are this rank's. The others are those of ``gathered_attention``."""

    scale: float | None
    is_causal: bool
    gathers: bool
    kernel: str
    gqa: bool = False
    documents: int = 0
    rows: MaskRows | None = None
    inputs: Sequence[Tensor] = ()

    def in_parts(self, q: Tensor, keys: Sequence[Tensor], mask: Tensor | None, axis: AxisHandle) -> tuple[Any, ...]:
        """Return the arguments of ``attended``; ``keys``: k and v of all ranks."""
        (k, v), chunks = keys, list(parts_of(keys[0].shape[2], axis, self.is_causal))
        return AttentionCall(q, k, v, mask, self.is_causal, self.scale), self.kernel, chunks

    def plain(self, q: Tensor, keys: Sequence[Tensor], mask: Tensor | None, axis: AxisHandle) -> Tensor:
        k, v = keys
        if self.is_causal:
            return masked_causal_attention(q, k, v, axis, scale=self.scale, enable_gqa=self.gqa)
        if self.documents and mask is not None:
            options = (self.documents, self.scale, self.gqa, self.rows, self.inputs)
            return attention_by_documents(q, k, v, mask, *options)
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=self.gqa)


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, axis: AxisHandle, how: _How) -> Any:
        ctx.axis, ctx.how = axis, how
        whole = gathered_together((k, v), 2, axis, "forward") if how.gathers else (k, v)
        result = attended(*how.in_parts(q, whole, mask, axis))
        ctx.save_for_backward(q, k, v, mask, *result)
        return result.out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, mask, *result = ctx.saved_tensors
        whole = gathered_together((k, v), 2, ctx.axis, "backward") if ctx.how.gathers else (k, v)
        call, *parts = ctx.how.in_parts(q, whole, mask, ctx.axis)
        of_q, *others = attended_backward(grads[0], call, Result(*result), *parts)
        if ctx.how.gathers:
            others = scattered_sums(others, 2, ctx.axis, "backward")
        return of_q, *others, None, None, None


class _Again(torch.autograd.Function):
    """Attention with a backward that repeats the gather and the attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, axis: AxisHandle, how: _How) -> Any:
        ctx.axis, ctx.how = axis, how
        ctx.save_for_backward(q, k, v, mask)
        return how.plain(q, gathered_together((k, v), 2, axis, "forward"), mask, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, mask = ctx.saved_tensors
        leaves = [q.detach(), *gathered_together((k, v), 2, ctx.axis, "backward")]
        leaves = [t.detach().requires_grad_() for t in leaves]
        with torch.enable_grad():
            out = ctx.how.plain(leaves[0], leaves[1:], mask, ctx.axis)
        of_q, *others = torch.autograd.grad(out, leaves, grads[0])
        return of_q, *scattered_sums(others, 2, ctx.axis, "backward"), None, None, None


def of_gathered(
    axis: AxisHandle,
    target: Callable[..., Tensor],
    owns: Sequence[Tensor],
    dims: Sequence[int],
    ways: Sequence[Sequence[Step]],
    args: Sequence[Any],
) -> Tensor:
    """``target``, a product of two operands [.., n, k] [.., k, m] of equal outer dims, of ``args``, in which
    ``("gathered", i)`` is ``owns[i]`` gathered along ``dims[i]`` and passed through ``ways[i]``: further calls, each
    with its arguments after the operand."""
    numbers = [a[1] if isinstance(a, tuple) else None for a in args]
    operands = [a if i is None else owns[i] for a, i in zip(args, numbers, strict=True)]
    led = [None if i is None else (dims[i], ways[i]) for i in numbers]
    return _Product.apply(axis, target, led, *operands)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: AxisHandle, target: Callable[..., Tensor], led: list[Any], *operands: Tensor) -> Tensor:
        ctx.axis, ctx.led = axis, led
        ctx.save_for_backward(*operands)
        pairs = zip(operands, led, strict=True)
        return target(*(x if how is None else _led(gathered(x, how[0], axis, "forward"), how[1]) for x, how in pairs))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        roots: list[Tensor | None] = []
        wholes: list[Tensor] = []
        for x, how in zip(ctx.saved_tensors, ctx.led, strict=True):
            root = None if how is None else gathered(x, how[0], ctx.axis, "backward").requires_grad_()
            with torch.enable_grad():
                wholes.append(x if root is None or how is None else _led(root, how[1]))
            roots.append(root)
        left, right = (whole.detach() for whole in wholes)
        found = [grads[0] @ right.mT, left.mT @ grads[0]]
        for i, (root, how) in enumerate(zip(roots, ctx.led, strict=True)):
            if root is not None and how is not None:
                (whole,) = torch.autograd.grad(wholes[i], root, found[i])
                found[i] = scattered_sum(whole, how[0], ctx.axis, "backward")
        return None, None, None, *found


def _led(whole: Tensor, way: Sequence[Step]) -> Tensor:
    for target, rest in way:
        whole = target(whole, *rest)
    return whole
