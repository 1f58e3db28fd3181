"""A product with a weight, with two separate gradients: the input's goes to autograd, the weight's to its buffer.

    forward     y = x W + b
    backward    gx = g Wᵀ              goes back to autograd
                gW += gᵀ x             added into the runtime's buffer, or deferred (passes.ops.weight_gradients)
                gb += Σ g

Autograd knows nothing of such a weight: the op has it beside its inputs, so no gradient of it is made, saved or passed
on. If a weight has no place, or x carries no gradient that would bring the backward here, autograd does everything. The
functions below are shared with the products that exchange (passes.ops.column_linear): those of several weights read one
x.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from passes.ops.weight_gradients import Handle, Place

aten = torch.ops.aten
Places = Sequence[Place | None]  # of weights, then of biases; None: frozen


def linear(x: Tensor, weight: Any, bias: Any, transposed: bool, handle: Handle | None = None) -> Tensor:
    """x [.., n] times ``weight`` ([m, n], or [n, m] if ``transposed``), plus ``bias`` [m] or None: [.., m].

    ``handle``: knows the places of weight gradients; None: autograd has them.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        places = places_of(handle, (weight, bias))
        if places is not None:
            return _Linear.apply(x, (weight, bias), transposed, handle, places)  # pyright: ignore
    return product(x, weight, bias, transposed)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Any, transposed: bool, handle: Handle, places: Places) -> Tensor:
        weight, bias = held
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        if places[0] is not None:
            ctx.save_for_backward(rows)
        ctx.weight, ctx.transposed, ctx.handle, ctx.places, ctx.shape = weight, transposed, handle, places, x.shape
        ctx.set_materialize_grads(False)
        matrix = weight if transposed else weight.t()
        out = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
        return out if x.dim() == 2 else aten._unsafe_view.default(out, (*x.shape[:-1], out.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, gradient, handle, places = grads[0], None, ctx.handle, ctx.places
        # first of all, since a recomputation should not overlap tensors made below; and detached: a deferred tensor
        # would otherwise hold all of the graph that led to it
        x = ctx.saved_tensors[0].detach() if places[0] is not None else None
        if grad is not None:
            grad = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
            gradient = torch.mm(grad, ctx.weight.t() if ctx.transposed else ctx.weight)
            gradient = gradient if len(ctx.shape) == 2 else aten._unsafe_view.default(gradient, ctx.shape)
        if puts_aside(handle, places):
            handle.keep(partial(_work, x, grad, places, ctx.transposed))
        else:
            add_held(x, (grad,), places, ctx.transposed)
        return gradient, None, None, None, None


def _work(x: Tensor | None, grad: Tensor | None, places: Places, transposed: bool, _: Any) -> None:
    add_held(x, (grad,), places, transposed)


# ---- shared by all products


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    if not transposed:
        return aten.linear.default(x, weight, bias)
    return aten.mm.default(x, weight) if bias is None else aten.addmm.default(bias, x, weight)


def places_of(handle: Handle | None, held: Sequence[Any]) -> tuple[Place | None, ...] | None:
    """For each weight and bias the place of its gradient, None for one without; None if one is autograd's."""
    if handle is None or not handle.is_bound:
        return None
    found = tuple(handle.place_of(t) if t is not None and t.requires_grad else None for t in held)
    for tensor, place in zip(held, found, strict=True):
        if place is None and tensor is not None and tensor.requires_grad:
            return None
    return found


def puts_aside(handle: Any, places: Places) -> bool:
    """Whether a backward leaves work for its W: with frozen weights alone it would hold gradients for nothing."""
    return handle.waits and any(place is not None for place in places)


def add_held(x: Tensor | None, rows: Sequence[Tensor | None], places: Places, transposed: bool) -> None:
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
            place.add_rows(gradient)
        elif transposed:
            place.add_product(x.t(), gradient)  # pyright: ignore[reportOptionalMemberAccess]
        else:
            place.add_product(gradient.t(), x)  # pyright: ignore[reportArgumentType]


def of_held(
    x: Tensor | None, rows: Sequence[Tensor | None], needed: Sequence[bool], transposed: bool
) -> list[Tensor | None]:
    """Gradients of the weights, then of the biases, for autograd; None if none is needed.

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
            found.append(x.t() @ gradient if transposed else gradient.t() @ x)  # pyright: ignore
    return found


def of_input(shape: Any, weights: Sequence[Tensor], rows: Sequence[Tensor | None], transposed: bool) -> Tensor:
    """The gradient of x of that shape over all products, in memory of its own."""
    total = None
    for weight, gradient in zip(weights, rows, strict=True):
        if gradient is None:
            continue
        matrix = weight.t() if transposed else weight
        total = torch.mm(gradient, matrix) if total is None else total.addmm_(gradient, matrix)
    return weights[0].new_zeros(shape) if total is None else total.view(shape)
