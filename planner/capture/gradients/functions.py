"""Is the backward of a user's torch.autograd.Function the derivative of its forward?

torch.export keeps the ops of a Function's forward, and gradients are derived from them. For a fused or memory-saving
Function they are the same; for a straight-through estimator or a reversed gradient they are not, and the Function stays
one op with its own backward (passes.program.ops.own_backward). So each distinct use is tried once, on small random
tensors of its input shapes:

    d(Function.apply)/dx   against   d(Function.forward)/dx by autograd

Values are drawn around 0, positive, far from 0 (with larger rounding errors: in float64 only) and next to 0, where a
root or a quotient may be bounded. A value that only the derivative makes non-finite is a difference; a value that the
Function makes non-finite is not compared. The norm of the difference is compared. Only these trials (and
capture.own_backward.trials) run a backward while planning: after it, on a torch built for CUDA, a fork of this process
cannot run another (launchers here start processes that have not planned).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from planner.capture.own_backward.applications import (
    COARSE,
    SAMPLES,
    Application,
    LowestPrecision,
    Sample,
    applied,
    draw,
    on_the_side,
)

NOTHING = 1e-2  # a gradient that is smaller than this much of the arriving one, times the tolerance, is rounding
NEXT_TO_ZERO = Sample(1e-9, 0.0, 1.0, 1e-6)
MANY_ELEMENTS = 10**6
_PARTS = ("_higher_order_ops", "_library", "_functorch", "_dynamo", "nn.modules", "utils.checkpoint")
_NOT_OURS = tuple(f"torch.{name}" for name in _PARTS)


def is_of_torch(function: type[Function]) -> bool:
    """Functions by which PyTorch itself makes its ops differentiable."""
    return function.__module__.startswith(_NOT_OURS)


def is_derived(use: Application) -> bool | None:
    """None if that is unknown: the Function does not run by itself, or gives nothing finite."""
    if not any(shape.requires_grad for shape in use.shapes):
        return True
    for attempt in use.attempts(MANY_ELEMENTS):
        try:
            equal = _agree_on_samples(attempt)
        except Exception:  # whatever the user's code raises on tensors that it was not written for
            continue
        if equal is not None:
            return equal
    return None


def _agree_on_samples(use: Application) -> bool | None:
    """All samples in float64; if the Function itself is coarser, only the first that is conclusive."""
    known = None
    for sample in (*SAMPLES, NEXT_TO_ZERO):
        equal, dtype = _agree(use, sample)
        known = known if equal is None else equal
        if known is False or (known and dtype != torch.float64):
            break
    return known


def _agree(use: Application, sample: Sample) -> tuple[bool | None, torch.dtype]:
    """Whether both gradients are equal on one draw of values, None if nothing finite is left to compare; and the
    coarsest dtype of the ops inside.
    """
    with on_the_side(), LowestPrecision() as seen:
        own = _gradients(use, use.function.apply, sample)
        derived = _gradients(use, lambda *args: _forward(use.function, args), sample)
    tolerance = sample.tolerance if seen.dtype == torch.float64 else COARSE.get(seen.dtype, 0.5)
    compared = None
    for a, b in zip(own, derived, strict=True):
        finite = torch.isfinite(a)
        a, b = a[finite], b[finite]
        if not torch.isfinite(b).all():
            return False, seen.dtype
        if not a.numel():
            continue
        compared = True
        rounding = NOTHING * sample.gradient * a.numel() ** 0.5
        size = max(a.norm().item(), b.norm().item(), rounding)
        if (a - b).norm().item() > tolerance * size:
            return False, seen.dtype
    return compared, seen.dtype


def _gradients(use: Application, run: Callable[..., Any], sample: Sample) -> list[Tensor]:
    """For each tensor that requires one, with random gradients of the outputs; zeros if none arrives."""
    torch.manual_seed(0)
    values = draw(use, sample)
    _, found = applied(use, values, run, lambda _, output: _arriving(output, sample))
    asked = [v for s, v in zip(use.shapes, values, strict=True) if s.requires_grad]
    return [torch.zeros_like(v) if g is None else g for v, g in zip(asked, found, strict=True)]


def _arriving(output: Tensor, sample: Sample) -> Tensor:
    return torch.randn(output.shape, dtype=torch.float64).mul(sample.gradient).to(output.dtype)


def _forward(function: type[Function], args: tuple[Any, ...]) -> Any:
    if function.setup_context is not Function.setup_context:
        return function.forward(*args)
    return function.forward(_Context(args), *args)


class _Context:
    """Replaces ``ctx`` for a forward that runs by itself: accepts anything that is stored and ignores it."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def _ignore(self, *_: Any) -> None: ...

    save_for_forward = mark_dirty = mark_non_differentiable = set_materialize_grads = _ignore
