"""The rows of each expert times its own matrix, with the weight gradient added into the runtime's buffer.

    forward     y_e = x_e W_e                       rows [n, i] by expert, W [E, i, o] (or [E, o, i], ``transposed``)
    backward    gx_e = g_e W_eᵀ                     goes back to autograd
                gW_e += x_eᵀ g_e                    expert by expert into its part of the buffer

By autograd the gradient of a stack is a stack: one matrix for each expert, joined, and then added to the buffer. If one
call multiplies all experts (passes.ops.meeting), one call makes that gradient too, which is then added as one tensor:
that kernel writes in the dtype of the rows, and cannot add. It does not wait for a W of the schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from passes.ops.linear import places_of
from passes.ops.meeting import Meeting, gradient_of_groups, grouped_mm, has_kernel
from passes.ops.weight_gradients import Handle, Place


def grouped_linear(rows: Tensor, weights: Tensor, here: Meeting, transposed: bool, handle: Handle | None) -> Tensor:
    """Rows of this rank's experts, by expert [n, i] → [n, o]. ``handle``: as of passes.ops.linear."""
    places = places_of(handle, (weights,)) if torch.is_grad_enabled() and rows.requires_grad else None
    if places is None:
        return grouped_mm(rows, _matrices(weights, transposed), here)
    return _Grouped.apply(rows, (weights,), here, transposed, places[0])  # pyright: ignore


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, held: Any, here: Meeting, transposed: bool, place: Place | None) -> Tensor:
        ctx.weights, ctx.here, ctx.transposed, ctx.place = held[0], here, transposed, place
        ctx.set_materialize_grads(False)
        if place is not None:
            ctx.save_for_backward(rows)
        return grouped_mm(rows, _matrices(held[0], transposed), here)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, here, place = grads[0], ctx.here, ctx.place
        rows = ctx.saved_tensors[0].detach() if place is not None else None
        of_rows = None if grad is None else grouped_mm(grad, _matrices(ctx.weights, not ctx.transposed), here)
        if place is not None:
            _add(place, rows, grad, ctx.weights, ctx.transposed, here)
        return of_rows, None, None, None, None


def _matrices(weights: Tensor, transposed: bool) -> Tensor:
    return weights.transpose(1, 2) if transposed else weights


def _add(place: Place, rows: Any, grad: Tensor | None, weights: Tensor, transposed: bool, here: Meeting) -> None:
    """Add the gradient of the stack to its buffer."""
    if grad is None:
        place.add_nothing()
        return
    left, right = (grad, rows) if transposed else (rows, grad)
    if has_kernel(rows, _matrices(weights, transposed)):
        place.add_whole(gradient_of_groups(left, right, here))
    else:
        place.add_products([part.t() for part in left.split(here.sizes)], right.split(here.sizes))
