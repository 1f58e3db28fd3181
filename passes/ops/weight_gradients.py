"""Weight gradients as work of their own: done at once in the backward, or deferred until a W of the schedule.

    B of (chunk, microbatch)    products give the gradients of their inputs; each keeps x and g
    W of (chunk, microbatch)    gW += gᵀ x,  gb += Σ g, product by product, in the order in which they were kept

So a stage can send the gradient of its input before it has those of its weights (Qi et al. 2023, section 2). The
results are added to the runtime's gradient buffer of the parameter; a handle without bound places leaves them to
autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from passes.interceptors import installed
from passes.program.ops.aten import HALF

Key = tuple[int, int]  # (chunk, microbatch)
Work = Callable[[Any], None]  # takes the result of its ``begin``
Begin = Callable[[], Callable[[], Any]]
Add = Callable[..., None]  # (main, *values, is_fresh): into the memory of a sum


class SumPlace(Protocol):
    """The place at which the gradient of one parameter is summed over products and microbatches."""

    def add(self, add: Add, *values: Any) -> None:
        """Add to the sum what ``add``, one of the functions below, makes of ``values``; it ends one contribution."""

    def add_nothing(self) -> None:
        """End a contribution without a gradient."""


class Places(Protocol):
    """The owner of the gradient sums of parameters."""

    def place_of(self, parameter: Tensor) -> SumPlace | None:
        """None for a tensor with a gradient that autograd computes."""
        ...


class WeightGradients:
    """One rank's weight gradients as its graphs see them; the runtime binds the places of their sums.

    Owns: the deferred work that has not run.
    """

    def __init__(self) -> None:
        self._places: Places | None = None
        self._aside: deque[tuple[Begin | None, Work]] | None = None
        self._kept: dict[Key, deque[tuple[Begin | None, Work]]] = {}

    def __repr__(self) -> str:
        return "weight_gradients"

    def bind(self, places: Places) -> None:
        self._places = places

    @property
    def places(self) -> Places | None:
        """None while autograd alone takes gradients of weights."""
        return self._places

    def place_of(self, parameter: Tensor) -> SumPlace | None:
        """Return the place of the gradient of ``parameter``; None: it goes to autograd."""
        return None if self.places is None else self.places.place_of(parameter)

    def as_bound_now(self) -> WeightGradients:
        """Return another handle, which stays bound to the places of this moment: for an op that runs a second time."""
        found = WeightGradients()
        found._places = self.places
        return found

    # ---- the backward

    @property
    def waits(self) -> bool:
        """Whether work is put aside now."""
        return self._aside is not None

    @contextmanager
    def put_aside(self, key: Key | None) -> Iterator[None]:
        """Defer the work for weights inside, in the backward of ``key``, to ``run(key)``. None: it is done at once."""
        assert key not in self._kept, f"the work of (chunk, microbatch) {key} was deferred and has not run"
        if key is not None:
            self._aside = self._kept[key] = deque()
        try:
            yield
        finally:
            self._aside = None

    def keep(self, work: Work, begin: Begin | None = None) -> None:
        """Put ``work`` aside. ``begin`` starts an exchange while the work before is done; ``work`` takes its result."""
        assert self._aside is not None, "no work is being deferred"
        self._aside.append((begin, work))

    # ---- the schedule

    @property
    def num_waiting(self) -> int:
        """The number of backwards with deferred work: none at the end of a step."""
        return len(self._kept)

    @torch.no_grad()
    def run(self, key: Key) -> None:
        """Run the work that the backward of ``key`` deferred, in its order, and free it. It runs once."""
        assert key in self._kept, f"no backward has deferred work for (chunk, microbatch) {key}, or it has run"
        kept = self._kept.pop(key)
        ending = _begun(kept)
        while kept:
            end, (_, work) = ending, kept.popleft()
            given = None if end is None else end()
            ending = _begun(kept)
            work(given)

    def forget(self) -> None:
        """Drop the deferred work of a step that has failed."""
        self._aside, self._kept = None, {}

    def by_autograd(self) -> AbstractContextManager[None]:
        """Leave the weights of forwards inside to autograd, for callers that read its gradients."""
        return installed((self, "_places", None))


class AtOnce(WeightGradients):
    """The handle of products in a captured region, or that read its memory: none of their work waits for a W.

    A graph replays its capture, and its memory serves the next microbatch after the backward.

    While the region is captured, its leaves are not the parameters themselves: the capturing code gives the places of
    their gradients.
    """

    def __init__(self, handle: WeightGradients) -> None:
        super().__init__()
        self._handle = handle

    def __repr__(self) -> str:
        return "weight_gradients_at_once"

    @property
    def places(self) -> Places | None:
        return self._places or self._handle.places

    def keep(self, work: Work, begin: Begin | None = None) -> None:
        raise AssertionError("no deferred work belongs to a captured region or uses its memory")

    def bound_to(self, places: Places) -> AbstractContextManager[None]:
        """Add gradients there meanwhile."""
        return installed((self, "_places", places))


def _begun(kept: deque[tuple[Begin | None, Work]]) -> Callable[[], Any] | None:
    """Return the exchange of the next work, under way."""
    begin = kept[0][0] if kept else None
    return None if begin is None else begin()


# ---- into the memory of a sum: one of half precision is in float32, on CUDA within the product


def add_product(main: Tensor, left: Tensor, right: Tensor, *, is_fresh: bool) -> None:
    """Add left [m, r] @ right [r, n] to ``main`` [m, n]; ``is_fresh``: write the product alone."""
    if main.dtype == left.dtype:
        torch.mm(left, right, out=main) if is_fresh else main.addmm_(left, right)
    elif main.is_cuda and main.dtype == torch.float32 and left.dtype in HALF:
        if is_fresh:
            torch.ops.aten.mm.dtype_out(left, right, main.dtype, out=main)
        else:
            torch.ops.aten.addmm.dtype_out(main, left, right, main.dtype, out=main)
    else:
        add_whole(main, left @ right, is_fresh=is_fresh)


def add_products(main: Tensor, lefts: Sequence[Tensor], rights: Sequence[Tensor], *, is_fresh: bool) -> None:
    """Add the same to each part of ``main`` [parts, m, n]."""
    for part, left, right in zip(main.unbind(0), lefts, rights, strict=True):
        add_product(part, left, right, is_fresh=is_fresh)


def add_whole(main: Tensor, gradient: Tensor, *, is_fresh: bool) -> None:
    """Add to ``main`` a gradient of its shape; ``is_fresh``: write the gradient alone."""
    if is_fresh:
        main.copy_(gradient)
    else:
        main.add_(gradient)


def add_rows(main: Tensor, rows: Tensor, *, is_fresh: bool) -> None:
    """Add to ``main`` [m] the sum over dim 0 of ``rows`` [r, m]."""
    if is_fresh:
        torch.sum(rows, 0, dtype=main.dtype, out=main)
    else:
        main.add_(rows.sum(0, dtype=main.dtype))
