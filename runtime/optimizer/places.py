"""The slot of a gradient buffer in which one parameter's gradients are summed, as its products see it.

    first of the step    main_grad = left @ right      there is no zeroing pass
    others               main_grad += left @ right     within the product (beta 1): no gradient in memory of its own

A product of half precision is summed in the buffer's float32: on CUDA within the product, elsewhere it is made first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.optimizer.slots import ParameterSlot

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)


class ParameterPlace:
    """``arrived(parameter)`` is called for each contribution."""

    __slots__ = ("_arrived", "_parameter", "_slot")

    def __init__(self, slot: ParameterSlot, parameter: Tensor, arrived: Callable[[Tensor], None]) -> None:
        self._slot, self._parameter, self._arrived = slot, parameter, arrived

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add left [m, r] @ right [r, n] to the gradient [m, n]."""
        slot = self._slot
        add_product(slot.main_grad, left, right, is_fresh=slot.take())
        self._arrived(self._parameter)

    def add_products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
        """Add left [m, r] @ right [r, n] of each part to the gradient [parts, m, n]; r may be 0."""
        slot = self._slot
        add_products(slot.main_grad, lefts, rights, is_fresh=slot.take())
        self._arrived(self._parameter)

    def add_whole(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape."""
        slot = self._slot
        add_whole(slot.main_grad, gradient, is_fresh=slot.take())
        self._arrived(self._parameter)

    def add_rows(self, rows: Tensor) -> None:
        """Add the sum over dim 0 of ``rows`` [r, m] to the gradient [m]."""
        slot = self._slot
        add_rows(slot.main_grad, rows, is_fresh=slot.take())
        self._arrived(self._parameter)

    def add_nothing(self) -> None:
        """Nothing led back to the product."""
        self._arrived(self._parameter)


def add_product(main: Tensor, left: Tensor, right: Tensor, *, is_fresh: bool) -> None:
    """``main`` [m, n] plus left [m, r] @ right [r, n]; ``is_fresh``: the product alone."""
    if main.dtype != left.dtype:
        _add_wide(main, left, right, is_fresh)
    elif is_fresh:
        torch.mm(left, right, out=main)
    else:
        main.addmm_(left, right)


def add_products(main: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], *, is_fresh: bool) -> None:
    """The same of each part of ``main`` [parts, m, n]."""
    for part, left, right in zip(main.unbind(0), lefts, rights, strict=True):
        add_product(part, left, right, is_fresh=is_fresh)


def add_whole(main: Tensor, gradient: Tensor, *, is_fresh: bool) -> None:
    """``main`` plus a gradient of its shape; ``is_fresh``: the gradient alone."""
    if is_fresh:
        main.copy_(gradient)
    else:
        main.add_(gradient)


def add_rows(main: Tensor, rows: Tensor, *, is_fresh: bool) -> None:
    """``main`` [m] plus the sum over dim 0 of ``rows`` [r, m]."""
    if is_fresh:
        torch.sum(rows, 0, dtype=main.dtype, out=main)
    else:
        main.add_(rows.sum(0, dtype=main.dtype))


def _add_wide(main: Tensor, left: Tensor, right: Tensor, is_fresh: bool) -> None:
    """``main`` of a wider dtype than the product's factors."""
    if main.is_cuda and main.dtype == torch.float32 and left.dtype in _HALVES:
        if is_fresh:
            aten.mm.dtype_out(left, right, main.dtype, out=main)
        else:
            aten.addmm.dtype_out(main, left, right, main.dtype, out=main)
        return
    product = left @ right
    if is_fresh:
        main.copy_(product)
    else:
        main.add_(product)
