"""Products that read one value of type R: its gradient is summed over ranks while those of the weights are computed.

    forward     y_i = x W_i + b_i
    backward    gx = Σ g_i W_iᵀ  →  all-reduce starts;  gW_i = xᵀ g_i,  gb_i = Σ g_i;  all-reduce ends

It stands for an ``f`` and the linears behind it, which would sum when all of their backward is done. Where the value is
gathered first (sequence parallelism; Korthikanti et al. 2022, section 4.2), its part alone may be kept:

    forward     x = all-gather(part);  y_i = x W_i + b_i
    backward    all-gather(part) starts;  gx = Σ g_i W_iᵀ  →  reduce-scatter starts;  all-gather ends;
                gW_i = xᵀ g_i,  gb_i = Σ g_i;  reduce-scatter ends
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.collectives import all_gather, start_all_gather, start_all_reduce, start_reduce_scatter
from planner.placement.types import Placement

aten = torch.ops.aten


def column_linears(x: Tensor, axis: AxisHandle, transposed: bool, weights: list[Any], biases: list[Any]) -> Any:
    """x [.., n] of type I: the products with ``weights`` ([m, n], or [n, m] where ``transposed``), a tuple of them.

    ``biases``: [m] or None, one for each weight.
    """
    return _ColumnLinears.apply(x, axis, transposed, len(weights), *weights, *biases)


class _ColumnLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisHandle, transposed: bool, count: int, *tensors: Any) -> Any:
        weights, biases = tensors[:count], tensors[count:]
        ctx.axis, ctx.transposed, ctx.count = axis, transposed, count
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(_product(x, w, b, transposed) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        rows = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]
        gradient, work = None, None
        if ctx.needs_input_grad[0]:
            gradient = _of_input(x, weights, rows, ctx.transposed)
            work = start_all_reduce(gradient, ctx.axis, "backward")
        held = _of_held(x, rows, ctx.needs_input_grad[4:], ctx.transposed)
        if work is not None:
            work.wait()
        return gradient, None, None, None, *held


def gathered_linears(
    part: Tensor, axis: AxisHandle, cut: Placement, again: bool, transposed: bool, weights: list[Any], biases: list[Any]
) -> Any:
    """part [.., n/t or s/t, ..] of type V: the products of the gathered whole, as ``column_linears`` gives them.

    ``again``: the whole is not kept, but gathered a second time in the backward.
    """
    return _GatheredLinears.apply(part, axis, cut, again, transposed, len(weights), *weights, *biases)


class _GatheredLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: AxisHandle, cut: Placement, again: bool, *products: Any) -> Any:
        transposed, count, *tensors = products
        weights, biases = tensors[:count], tensors[count:]
        ctx.axis, ctx.cut, ctx.again, ctx.transposed = axis, cut, again, transposed
        whole = all_gather(part, axis, cut, "forward")
        ctx.save_for_backward(part if again else whole, *weights)
        ctx.set_materialize_grads(False)
        return tuple(_product(whole, w, b, transposed) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, *weights = ctx.saved_tensors
        rows = [None if g is None else g.reshape(-1, g.shape[-1]) for g in grads]
        gathered = start_all_gather(kept, ctx.axis, ctx.cut, "backward", ahead=True) if ctx.again else None
        summed = None
        if ctx.needs_input_grad[0]:
            gradient = _of_input(_whole_like(kept, ctx), weights, rows, ctx.transposed)
            summed = start_reduce_scatter(gradient, ctx.axis, ctx.cut, "backward", ahead=True)
        whole = kept if gathered is None else gathered()
        held = _of_held(whole, rows, ctx.needs_input_grad[6:], ctx.transposed)
        return summed() if summed is not None else None, None, None, None, None, None, *held


def _whole_like(kept: Tensor, ctx: Any) -> Tensor:
    """Without memory: the shape, dtype and device of the gathered value."""
    shape = list(kept.shape)
    if ctx.again:
        shape[ctx.cut.dim] = sum(segment.size for segment in ctx.cut.segments)
    return kept.new_empty(()).expand(shape)


def _of_held(x: Tensor, rows: list[Tensor | None], needed: Any, transposed: bool) -> list[Tensor | None]:
    """Gradients of the weights, then of the biases; None where nobody asks."""
    flat, count = x.reshape(-1, x.shape[-1]), len(rows)
    of_weights = [
        None if g is None or not asked else flat.t() @ g if transposed else g.t() @ flat
        for g, asked in zip(rows, needed[:count], strict=True)
    ]
    of_biases = [None if g is None or not asked else g.sum(0) for g, asked in zip(rows, needed[count:], strict=True)]
    return of_weights + of_biases


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return aten.linear.default(x, weight, bias)
    return aten.mm.default(x, weight) if bias is None else aten.addmm.default(bias, x, weight)


def _of_input(x: Tensor, weights: list[Tensor], rows: list[Tensor | None], transposed: bool) -> Tensor:
    """This rank's addend to the gradient of x, in memory of its own."""
    total = None
    for weight, gradient in zip(weights, rows, strict=True):
        if gradient is None:
            continue
        matrix = weight.t() if transposed else weight
        total = gradient @ matrix if total is None else total.addmm_(gradient, matrix)
    return torch.zeros_like(x, memory_format=torch.contiguous_format) if total is None else total.view(x.shape)
