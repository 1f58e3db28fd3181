"""Stand-ins for the ops that lowering inserts, with the same memory: the same results and saved tensors, without
communication. They run on fake tensors like any op (planner.saved.observe).

    f, first                        a view of the value
    g, g f, gather, collect, scatter, exchange      new memory, nothing kept
    slice, cut                      this rank's part
    dropout                         keeps one byte an element
    rows of an embedding            keeps ids, and a mask of those in the shard
    classes of a loss               keep the probabilities in float32, and three tensors of one number a token
    statistics over ranks           the ops of one rank, with sums between them
    attention over cp               keeps a rank's own keys and values, its result, and one number a row

A test compares each with the autograd of the real op. Shards are those of rank 0: all ranks have equal sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.types.types import Placement

aten = torch.ops.aten


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _New(torch.autograd.Function):
    """A tensor of the shape of x in memory of its own, and so is its gradient. ``more``: saved tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *more: Tensor) -> Tensor:
        ctx.save_for_backward(*more)
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _sum(grads[0]), *(None for _ in ctx.saved_tensors)


class _Moved(torch.autograd.Function):
    """One step each way, of those below."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: str, back: str, cut: Placement, size: int) -> Tensor:
        ctx.given = back, cut, size
        return _STEPS[there](x, cut, size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back, cut, size = ctx.given
        return _STEPS[back](grads[0], cut, size), None, None, None, None


def converted(x: Tensor, name: str, before: Placement, after: Placement, size: int) -> Tensor:
    """``x`` of type ``before`` in type ``after`` by the conversion ``name`` over ``size`` ranks."""
    if name == "cut":
        return _own(x, after, size) if after.padding else _part(x, after, size)
    if name == "exchange":
        return _Exchanged.apply(x, before, after, size)
    return _Moved.apply(x, *WAYS[name], before if before.is_sharded else after, size)


# how a value goes, and its gradient back
WAYS = {
    "f": ("view", "sum"),
    "f overlapped": ("view", "view"),  # summed in the memory that the linears after it made
    "g": ("sum", "view"),
    "g f": ("sum", "sum"),
    "slice": ("own", "gather"),
    "gather": ("gather", "scatter"),
    "collect": ("gather", "own"),
    "scatter": ("scatter", "gather"),
    "first": ("view", "view"),
}


def _sum(x: Tensor, cut: Placement | None = None, size: int = 1) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gather(x: Tensor, cut: Placement, size: int) -> Tensor:
    own = x.contiguous()
    if cut.in_place(x.shape):
        return x.new_empty([n * size if d == cut.dim else n for d, n in enumerate(x.shape)])
    parts = own.new_empty((size, *x.shape))
    data = [sum(cut.data_sizes(size, rank)) for rank in range(size)] if cut.padding else [x.shape[cut.dim]] * size
    return torch.cat([p.narrow(cut.dim, 0, n) for p, n in zip(parts.unbind(0), data, strict=True)], cut.dim)


def _scatter(x: Tensor, cut: Placement, size: int) -> Tensor:
    own = x.new_empty(cut.local_shape(tuple(x.shape), size))
    if cut.in_place(x.shape):
        x.contiguous()
    else:
        torch.stack([_part(x, cut, size)] * size)
    return own


def _part(x: Tensor, cut: Placement, size: int) -> Tensor:
    """The part of the last rank, which makes a copy if there is padding."""
    last, pieces = size - 1, []
    for (start, stop), num_data in zip(cut.slices(size, last), cut.data_sizes(size, last), strict=True):
        pieces += [x.narrow(cut.dim, start, num_data)] if num_data else []
        if num_data < stop - start:
            shape = [stop - start - num_data if d == cut.dim else n for d, n in enumerate(x.shape)]
            pieces.append(x.narrow(cut.dim, 0, 1).expand(shape))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)


def _own(x: Tensor, cut: Placement, size: int) -> Tensor:
    own = _part(x, cut, size)
    return own.clone(memory_format=torch.contiguous_format) if cut.padding else own.contiguous()


_STEPS: dict[str, Callable[[Tensor, Placement, int], Tensor]] = {
    "view": lambda x, cut, size: x.view_as(x),
    "sum": _sum,
    "own": _own,
    "gather": _gather,
    "scatter": _scatter,
}


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Placement, after: Placement, size: int) -> Tensor:
        ctx.given = after, before, size
        sent = torch.stack([_part(x, after, size)] * size)
        return torch.cat(torch.empty_like(sent).unbind(0), before.dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Exchanged.apply(grads[0], *ctx.given), None, None, None


def summed(x: Tensor) -> Tensor:
    """``g_f``, or any sum over ranks."""
    return _New.apply(x)


def dropout(x: Tensor, p: float, train: bool = True) -> Tensor:
    return _New.apply(x, torch.empty_like(x, dtype=torch.bool, requires_grad=False))


def embedding(weight: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    """weight [v/tp, h]: this rank's rows."""
    outside = (ids < 0) | (ids >= weight.shape[0])
    return F.embedding(ids.masked_fill(outside, 0), weight).masked_fill(outside.unsqueeze(-1), 0.0)


class _Classes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        probabilities = logits.new_empty(logits.shape, dtype=_wide(logits[:0]).dtype)
        ctx.dtype = logits.dtype
        mine, valid = (torch.empty_like(target, dtype=torch.bool) for _ in range(2))
        more = () if weight is None else (weight.to(probabilities.dtype)[target],)
        total = probabilities.sum(1)
        ctx.save_for_backward(probabilities, mine, torch.empty_like(target), valid, total, *more)
        return torch.empty_like(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        probabilities, _, target, *_ = ctx.saved_tensors
        probabilities.scatter_add_(1, target.unsqueeze(1), grads[0].to(probabilities.dtype).unsqueeze(1))
        return probabilities.to(ctx.dtype), None, None


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, **rest: Any
) -> Tensor:
    """logits [n, v/tp]: this rank's classes."""
    losses = _Classes.apply(logits, target, weight)
    if reduction == 0:
        return losses.to(logits.dtype)
    count = torch.empty_like(target, dtype=torch.bool).sum() if weight is None else losses.detach().sum()
    return (losses.sum() if reduction == 2 else losses.sum() / count).to(logits.dtype)


def overwriting_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, **rest: Any
) -> Tensor:
    """The same, with its saved tensor in the memory of the logits."""
    losses = _Overwriting.apply(logits, target, weight)
    return losses if reduction == 0 else losses.sum()


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        mine, valid = (torch.empty_like(target, dtype=torch.bool) for _ in range(2))
        total = logits.detach().sum(1)
        more = () if weight is None else (weight.to(logits.dtype)[target],)
        ctx.save_for_backward(logits.detach(), total, mine, torch.empty_like(target), valid, *more)
        return torch.empty_like(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0], None, None


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(torch.zeros_like(_wide(x)))
        return x.narrow(dim, 0, 1).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (parts,) = ctx.saved_tensors
        return (parts * grads[0].to(parts.dtype)).to(grads[0].dtype), None


def logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    result = _LogSumExp.apply(x, dim[0] % x.dim())
    return result if keepdim else result.squeeze(dim[0])


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    wide = _wide(x if dtype is None else x.to(dtype))
    return (wide - summed(_LogSumExp.apply(wide, dim % x.dim()))).to(dtype or x.dtype)


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    wide = _wide(x if dtype is None else x.to(dtype))
    return log_softmax(wide, dim).exp().to(dtype or x.dtype)


def gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """One element of the cut dim, which one rank has."""
    mine = (index >= 0) & (index < x.shape[dim])
    return x.gather(dim, index.clamp(0, x.shape[dim] - 1)).masked_fill(~mine, 0.0)


def layer_norm(
    x: Tensor, size: list[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *rest: Any
) -> Tensor:
    wide = _wide(x)
    centered = wide - _mean(wide)
    normed = (centered * torch.rsqrt(_mean(centered.square()) + eps)).to(x.dtype)
    scaled = normed if weight is None else normed * weight
    return scaled if bias is None else scaled + bias


def rms_norm(x: Tensor, size: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    wide = _wide(x)
    normed = (wide * torch.rsqrt(_mean(wide.square()) + (eps or 0.0))).to(x.dtype)
    return normed if weight is None else normed * weight


class _NormKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, _wide(x.narrow(-1, 0, 1)).clone())
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def rms_norm_kernel(x: Tensor, size: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """As on a GPU: one kernel each way, which saves its inputs and the root of each row."""
    return _NormKernel.apply(x, weight)


class _VectorNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int]) -> Tensor:
        norm = _wide(x).square().sum(dims, keepdim=True).sqrt_()
        ctx.save_for_backward(x, norm)
        return norm.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, norm = ctx.saved_tensors
        return (x * (grads[0] / norm).masked_fill_(norm == 0, 0)).to(x.dtype), None


def vector_norm(
    x: Tensor, ord: float = 2, dim: list[int] | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    dims = sorted({d % x.dim() for d in dim or range(x.dim())})
    result = _VectorNorm.apply(x, dims)
    return result if keepdim else result.squeeze(dims)


def _mean(x: Tensor) -> Tensor:
    return summed(x.sum(-1, keepdim=True)) / 2


def shared_key_attention(
    q: Tensor, k: Tensor, v: Tensor, tp: int, *, attend: Any = F.scaled_dot_product_attention, **given: Any
) -> Tensor:
    """q [b, h/tp, s, d] of this rank's heads, k and v [b, g, t, d] replicated: it picks the key heads that they read.

    ``attend``: by which kernel.
    """
    local, per_group = q.shape[1], q.shape[1] * tp // k.shape[1]
    heads = [head // per_group for head in range(local)]
    count = heads[-1] + 1
    if heads == [i // (local // count) for i in range(local)]:
        k, v = k.narrow(1, 0, count), v.narrow(1, 0, count)
    else:
        k, v = (torch.cat([x.narrow(1, head, 1) for head in heads], 1) for x in (k, v))
    gqa = k.shape[1] != local
    mask = given.pop("mask", given.pop("attn_mask", None))
    return attend(q, k, v, attn_mask=mask, **{**given, "enable_gqa": gqa})


SPELLED_ANEW: dict[Any, Any] = {
    aten.embedding.default: embedding,
    aten.cross_entropy_loss.default: cross_entropy,
    aten.logsumexp.default: logsumexp,
    aten.softmax.int: softmax,
    aten.log_softmax.int: log_softmax,
    aten.layer_norm.default: layer_norm,
    aten.rms_norm.default: rms_norm,
    aten.linalg_vector_norm.default: vector_norm,
    aten.amax.default: torch.amax,
    aten.amin.default: torch.amin,
    aten.gather.default: gather,
}
