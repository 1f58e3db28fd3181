"""Products that read one value of type R: its gradient is summed over ranks while those of the weights are computed.

    forward     y_i = x W_i + b_i
    backward    gx = Σ g_i W_iᵀ  →  all-reduce starts;  gW_i = xᵀ g_i,  gb_i = Σ g_i;  all-reduce ends

It stands for an ``f`` and the linears behind it, which would sum when all of their backward is done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.collectives import start_all_reduce

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
        needs_weight, needs_bias = ctx.needs_input_grad[4 : 4 + ctx.count], ctx.needs_input_grad[4 + ctx.count :]
        flat = x.reshape(-1, x.shape[-1])
        of_weights = [
            None if g is None or not needed else flat.t() @ g if ctx.transposed else g.t() @ flat
            for g, needed in zip(rows, needs_weight, strict=True)
        ]
        of_biases = [None if g is None or not needed else g.sum(0) for g, needed in zip(rows, needs_bias, strict=True)]
        if work is not None:
            work.wait()
        return gradient, None, None, None, *of_weights, *of_biases


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
