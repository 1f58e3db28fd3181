"""Products that read one value of type R: its gradient is summed over ranks while those of the weights are computed.

    forward     y_i = x W_i + b_i
    backward    gx = Σ g_i W_iᵀ  →  all-reduce starts;  gW_i = xᵀ g_i,  gb_i = Σ g_i;  all-reduce ends

It replaces an ``f`` and the linears after it, which would sum only after their full backward. If the value is gathered
first (sequence parallelism; Korthikanti et al. 2022, section 4.2), its part alone may be saved:

    forward     x = all-gather(part);  y_i = x W_i + b_i
    backward    all-gather(part) starts;  gx = Σ g_i W_iᵀ  →  reduce-scatter starts;  all-gather ends;
                gW_i = xᵀ g_i,  gb_i = Σ g_i;  reduce-scatter ends

Gradients of weights that are put aside (passes.ops.weight_gradients) gather the part when they are computed. If no
weight trains, x is not saved: its own gradient does not need it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.collectives import all_gather, start_all_gather, start_all_reduce, start_reduce_scatter
from passes.ops.linear import add_held, of_held, of_input, places_of, product, puts_aside
from passes.ops.weight_gradients import Handle
from passes.types.types import Placement


def column_linears(
    x: Tensor,
    axis: AxisHandle,
    transposed: bool,
    weights: list[Any],
    biases: list[Any],
    handle: Handle | None = None,
) -> Any:
    """x [.., n] of type I: the products with ``weights`` ([m, n], or [n, m] if ``transposed``), as a tuple.

    ``biases``: [m] or None, one for each weight. ``handle``: as of ``linear``.
    """
    held = (*weights, *biases)
    places = places_of(handle, held) if x.requires_grad else None
    return _ColumnLinears.apply(x, axis, transposed, handle, held, places, *(held if places is None else ()))


class _ColumnLinears(torch.autograd.Function):
    """``edges``: weights and biases once more, if autograd computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: AxisHandle, transposed: bool, handle: Any, held: Any, places: Any, *edges: Any
    ) -> Any:
        ctx.axis, ctx.transposed, ctx.handle, ctx.places = axis, transposed, handle, places
        ctx.weights, biases = held[: len(held) // 2], held[len(held) // 2 :]
        ctx.shape = x.shape
        if _any_trains(ctx.weights):
            ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return tuple(product(x, w, b, transposed) for w, b in zip(ctx.weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = _kept(ctx)
        rows, gradient, work = _as_matrices(grads), None, None
        if ctx.needs_input_grad[0]:
            gradient = of_input(ctx.shape, ctx.weights, rows, ctx.transposed)
            work = start_all_reduce(gradient, ctx.axis, "backward")
        of_edges: Any = ()
        if ctx.places is None:
            of_edges = of_held(_as_matrix(x), rows, ctx.needs_input_grad[6:], ctx.transposed)
        elif puts_aside(ctx.handle, ctx.places):
            ctx.handle.keep(partial(_add, x, rows, ctx.places, ctx.transposed))
        else:
            add_held(_as_matrix(x), rows, ctx.places, ctx.transposed)
        if work is not None:
            work.wait()
        return gradient, None, None, None, None, None, *of_edges


def gathered_linears(
    part: Tensor,
    axis: AxisHandle,
    cut: Placement,
    again: bool,
    transposed: bool,
    weights: list[Any],
    biases: list[Any],
    handle: Handle | None = None,
) -> Any:
    """part [.., n/t or s/t, ..] of type V: the products of the gathered value, as ``column_linears`` gives them.

    ``again``: the full value is not saved, but gathered again for the gradients of weights.
    """
    held = (*weights, *biases)
    places = places_of(handle, held) if part.requires_grad else None
    given = (axis, cut, again, transposed, handle, held, places)
    return _GatheredLinears.apply(part, given, *(held if places is None else ()))


class _GatheredLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, given: Any, *edges: Any) -> Any:
        ctx.axis, ctx.cut, ctx.again, ctx.transposed, ctx.handle, held, ctx.places = given
        ctx.weights, biases = held[: len(held) // 2], held[len(held) // 2 :]
        whole = all_gather(part, ctx.axis, ctx.cut, "forward")
        ctx.shape = whole.shape
        if _any_trains(ctx.weights):
            ctx.save_for_backward(part if ctx.again else whole)
        ctx.set_materialize_grads(False)
        return tuple(product(whole, w, b, ctx.transposed) for w, b in zip(ctx.weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept = _kept(ctx)
        rows, summed, of_edges, begin = _as_matrices(grads), None, (), None
        if ctx.again and kept is not None:
            begin = partial(start_all_gather, kept, ctx.axis, ctx.cut, "backward", ahead=True)
        waits = ctx.places is not None and puts_aside(ctx.handle, ctx.places)
        gathered = begin() if begin is not None and not waits else None
        if ctx.needs_input_grad[0]:
            gradient = of_input(ctx.shape, ctx.weights, rows, ctx.transposed)
            summed = start_reduce_scatter(gradient, ctx.axis, ctx.cut, "backward", of_gradient=True, ahead=True)
            del gradient  # the running sum holds the data, as a copy if the parts had to be concatenated
        if waits:
            ctx.handle.keep(partial(_add, kept, rows, ctx.places, ctx.transposed), begin)
        else:
            whole = _as_matrix(kept if gathered is None else gathered())
            del gathered  # and with it the parts as they came
            if ctx.places is None:
                of_edges = of_held(whole, rows, ctx.needs_input_grad[2:], ctx.transposed)
            else:
                add_held(whole, rows, ctx.places, ctx.transposed)
        return summed() if summed is not None else None, None, *of_edges


def _any_trains(weights: Any) -> bool:
    return any(weight.requires_grad for weight in weights)


def _kept(ctx: Any) -> Tensor | None:
    """The saved tensor, detached: a deferred one would otherwise hold all of the graph that led to it."""
    return ctx.saved_tensors[0].detach() if ctx.saved_tensors else None


def _add(kept: Tensor | None, rows: Any, places: Any, transposed: bool, gathered: Tensor | None) -> None:
    """The deferred work; ``gathered``: the full value, if it was not saved."""
    add_held(_as_matrix(kept if gathered is None else gathered), rows, places, transposed)


def _as_matrices(grads: Any) -> list[Tensor | None]:
    return [_as_matrix(g) for g in grads]


def _as_matrix(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.reshape(-1, x.shape[-1])
