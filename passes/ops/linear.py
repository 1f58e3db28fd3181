"""Products with weights, with two separate gradients: the input's goes to autograd, the weights' to their buffers.

    forward     y = x W + b
    backward    gx = g Wᵀ              goes back to autograd
                gW += gᵀ x             added into the runtime's buffer, or deferred (passes.ops.weight_gradients)
                gb += Σ g

Autograd knows nothing of such a weight: the op has it beside its inputs, so no gradient of it is made, saved or passed
on. If a weight has no place, or x carries no gradient that would bring the backward here, autograd does everything.

Products that read one value of type R: its gradient is summed over ranks while those of the weights are computed.

    forward     y_i = x W_i + b_i
    backward    gx = Σ g_i W_iᵀ  →  all-reduce starts;  gW_i = xᵀ g_i,  gb_i = Σ g_i;  all-reduce ends

They replace an ``f`` and the linears after it, which would sum only after their full backward. If the value is gathered
first (sequence parallelism; Korthikanti et al. 2022, section 4.2), its part alone may be saved:

    forward     x = all-gather(part);  y_i = x W_i + b_i
    backward    all-gather(part) starts;  gx = Σ g_i W_iᵀ  →  reduce-scatter starts;  all-gather ends;
                gW_i = xᵀ g_i,  gb_i = Σ g_i;  reduce-scatter ends

Gradients of weights that are put aside gather the part when they are computed. If no weight trains, x is not saved: its
own gradient does not need it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.collectives import Ending, all_gather, ended, start_all_gather, start_all_reduce, start_reduce_scatter
from passes.ops.weight_gradients import SumPlace, WeightGradients, add_product, add_rows
from passes.types.types import Placement

aten = torch.ops.aten
Places = Sequence[SumPlace | None]  # of weights, then of biases; None: frozen


def linear(x: Tensor, weight: Any, bias: Any, transposed: bool, handle: WeightGradients | None = None) -> Tensor:
    """Return x [.., n] times ``weight`` ([m, n], or [n, m] if ``transposed``), plus ``bias`` [m] or None: [.., m].

    ``handle``: knows the places of weight gradients; None: autograd has them.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        places = places_of(handle, (weight, bias))
        if places is not None:
            return _Products.apply(x, (_HERE, transposed, handle, (weight,), places), (bias,))[0]  # pyright: ignore
    return _product(x, weight, bias, transposed)


def column_linears(
    x: Tensor,
    axis: AxisHandle,
    transposed: bool,
    weights: list[Any],
    biases: list[Any],
    handle: WeightGradients | None = None,
) -> Any:
    """x [.., n] of type I: the products with ``weights`` ([m, n], or [n, m] if ``transposed``), as a tuple.

    ``biases``: [m] or None, one for each weight. ``handle``: as of ``linear``.
    """
    return _exchanged(x, _Way(axis), transposed, weights, biases, handle)


def gathered_linears(
    part: Tensor,
    axis: AxisHandle,
    cut: Placement,
    again: bool,
    transposed: bool,
    weights: list[Any],
    biases: list[Any],
    handle: WeightGradients | None = None,
) -> Any:
    """part [.., n/t or s/t, ..] of type V: the products of the gathered value, as ``column_linears`` gives them.

    ``again``: the full value is not saved, but gathered again for the gradients of weights.
    """
    return _exchanged(part, _Way(axis, cut, again), transposed, weights, biases, handle)


class _Way(NamedTuple):
    """How x comes, and how its gradient is summed. ``axis``: None if nothing is exchanged. ``cut``: of the part that
    each rank has; None if all have x. ``again``: as of ``gathered_linears``."""

    axis: AxisHandle | None = None
    cut: Placement | None = None
    again: bool = False

    def whole(self, x: Tensor) -> Tensor:
        return x if self.axis is None or self.cut is None else all_gather(x, self.axis, self.cut, "forward")

    def again_of(self, kept: Tensor | None) -> partial[Ending] | None:
        """Begin to gather what was not saved."""
        if self.axis is None or self.cut is None or not self.again or kept is None:
            return None
        return partial(start_all_gather, kept, self.axis, self.cut, "backward", ahead=True)

    def summed(self, gradient: Tensor) -> Ending:
        """Begin to sum it over ranks."""
        if self.axis is None:
            return lambda: gradient
        if self.cut is not None:
            return start_reduce_scatter(gradient, self.axis, self.cut, "backward", of_gradient=True, ahead=True)
        return partial(ended, [start_all_reduce(gradient, self.axis, "backward")], gradient)


_HERE = _Way()


def _exchanged(
    x: Tensor, way: _Way, transposed: bool, weights: list[Any], biases: list[Any], handle: WeightGradients | None
) -> Any:
    held = (*weights, *biases)
    places = places_of(handle, held) if x.requires_grad else None
    edges = held if places is None else ()
    return _Products.apply(x, (way, transposed, handle, weights, places), biases, *edges)


class _Products(torch.autograd.Function):
    """``edges``: weights and biases once more, if autograd computes their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: Any, biases: Any, *edges: Any) -> Any:
        ctx.way, ctx.transposed, ctx.handle, ctx.weights, ctx.places = given
        whole = ctx.way.whole(x)
        ctx.shape = whole.shape
        if ctx.way.axis is None:  # a sum over ranks may overwrite a product of matrices: it is no view
            whole = _as_matrix(whole)
        if any(weight.requires_grad for weight in ctx.weights):
            ctx.save_for_backward(x if ctx.way.again else whole)
        ctx.set_materialize_grads(False)
        found = [_product(whole, w, b, ctx.transposed) for w, b in zip(ctx.weights, biases, strict=True)]
        return tuple(_viewed(y, (*ctx.shape[:-1], y.shape[-1])) for y in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # first of all, since a recomputation should not overlap tensors made below; and detached: a deferred tensor
        # would otherwise hold all of the graph that led to it
        kept = ctx.saved_tensors[0].detach() if ctx.saved_tensors else None
        rows, of_edges, places = [_as_matrix(g) for g in grads], (), ctx.places
        begin, waits = ctx.way.again_of(kept), places is not None and puts_aside(ctx.handle, places)
        gathered = begin() if begin is not None and not waits else None
        summed = ctx.way.summed(_of_input(ctx, rows)) if ctx.needs_input_grad[0] else lambda: None
        if waits:
            ctx.handle.keep(partial(_add, kept, rows, places, ctx.transposed), begin)
        else:
            whole = _as_matrix(kept if gathered is None else gathered())
            del gathered  # and with it the parts as they came
            if places is None:
                of_edges = _of_held(whole, rows, ctx.needs_input_grad[3:], ctx.transposed)
            else:
                _add_held(whole, rows, places, ctx.transposed)
        return summed(), None, None, *of_edges


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed and x.dim() != 2:
        return aten.linear.default(x, weight, bias)
    matrix = weight if transposed else weight.t()
    return aten.mm.default(x, matrix) if bias is None else aten.addmm.default(bias, x, matrix)


def _viewed(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x if x.dim() == len(shape) else aten._unsafe_view.default(x, shape)


def _as_matrix(x: Any) -> Any:
    return x if x is None or x.dim() == 2 else x.reshape(-1, x.shape[-1])


# ---- places and gradients


def places_of(handle: WeightGradients | None, held: Sequence[Any]) -> tuple[SumPlace | None, ...] | None:
    """Return for each weight and bias the place of its gradient, None for one without; None if one is autograd's."""
    if handle is None or handle.places is None:
        return None
    found = tuple(handle.place_of(t) if t is not None and t.requires_grad else None for t in held)
    for tensor, place in zip(held, found, strict=True):
        if place is None and tensor is not None and tensor.requires_grad:
            return None
    return found


def puts_aside(handle: Any, places: Places) -> bool:
    """Whether a backward leaves work for its W: with frozen weights alone it would hold gradients for nothing."""
    return handle.waits and any(place is not None for place in places)


def _add(kept: Tensor | None, rows: Any, places: Any, transposed: bool, gathered: Tensor | None) -> None:
    """Run the deferred work; ``gathered``: the full value, if it was not saved."""
    _add_held(_as_matrix(kept if gathered is None else gathered), rows, places, transposed)


def _add_held(x: Any, rows: Sequence[Tensor | None], places: Places, transposed: bool) -> None:
    """Add the gradients of weights and biases to their places.

    x [r, n]. ``rows``: of each product its gradient [r, m], None if nothing came back.
    """
    count = len(rows)
    for number, place in enumerate(places):
        if place is None:
            continue
        gradient = rows[number % count]
        if gradient is None:
            place.add_nothing()
        elif number >= count:
            place.add(add_rows, gradient)
        else:
            place.add(add_product, *((x.t(), gradient) if transposed else (gradient.t(), x)))


def _of_held(x: Any, rows: Sequence[Tensor | None], needed: Sequence[bool], transposed: bool) -> list[Tensor | None]:
    """Return the gradients of the weights, then of the biases, for autograd; None if none is needed.

    ``x``: None if no weight gradient is needed.
    """
    count, found = len(rows), list[Tensor | None]()
    for number, asked in enumerate(needed):
        gradient = rows[number % count]
        if gradient is None or not asked:
            found.append(None)
        elif number >= count:
            found.append(gradient.sum(0))
        else:
            found.append(x.t() @ gradient if transposed else gradient.t() @ x)
    return found


def _of_input(ctx: Any, rows: Sequence[Tensor | None]) -> Tensor:
    """Return the gradient of x over all products, in memory of its own."""
    total = None
    for weight, gradient in zip(ctx.weights, rows, strict=True):
        if gradient is None:
            continue
        matrix = weight.t() if ctx.transposed else weight
        total = torch.mm(gradient, matrix) if total is None else total.addmm_(gradient, matrix)
    if total is None:
        return ctx.weights[0].new_zeros(ctx.shape)
    return _viewed(total, ctx.shape)
