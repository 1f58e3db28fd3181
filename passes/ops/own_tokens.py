"""A product that gathers an operand along the sequence, and saves only this rank's part of it for the backward.

y = a @ b          b: gathered along the sequence, then rearranged        saved: a, and this rank's part of b
ga = g @ bᵀ        b is gathered again
gb = aᵀ @ g        rearranged back, and reduce-scattered
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.context import gathered, scattered_sum

Step = tuple[Callable[..., Tensor], Sequence[Any]]


def of_gathered(
    axis: AxisHandle,
    target: Callable[..., Tensor],
    owns: Sequence[Tensor],
    dims: Sequence[int],
    ways: Sequence[Sequence[Step]],
    args: Sequence[Any],
) -> Tensor:
    """``target``, a product of two operands [.., n, k] [.., k, m] of equal outer dims, of ``args``, in which
    ``("gathered", i)`` is ``owns[i]`` gathered along ``dims[i]`` and passed through ``ways[i]``: further calls, each
    with its arguments after the operand."""
    numbers = [a[1] if isinstance(a, tuple) else None for a in args]
    operands = [a if i is None else owns[i] for a, i in zip(args, numbers, strict=True)]
    led = [None if i is None else (dims[i], ways[i]) for i in numbers]
    return _Product.apply(axis, target, led, *operands)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: AxisHandle, target: Callable[..., Tensor], led: list[Any], *operands: Tensor) -> Tensor:
        ctx.axis, ctx.led = axis, led
        ctx.save_for_backward(*operands)
        pairs = zip(operands, led, strict=True)
        return target(*(x if how is None else _led(gathered(x, how[0], axis, "forward"), how[1]) for x, how in pairs))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        roots: list[Tensor | None] = []
        wholes: list[Tensor] = []
        for x, how in zip(ctx.saved_tensors, ctx.led, strict=True):
            root = None if how is None else gathered(x, how[0], ctx.axis, "backward").requires_grad_()
            with torch.enable_grad():
                wholes.append(x if root is None or how is None else _led(root, how[1]))
            roots.append(root)
        left, right = (whole.detach() for whole in wholes)
        found = [grads[0] @ right.mT, left.mT @ grads[0]]
        for i, (root, how) in enumerate(zip(roots, ctx.led, strict=True)):
            if root is not None and how is not None:
                (whole,) = torch.autograd.grad(wholes[i], root, found[i])
                found[i] = scattered_sum(whole, how[0], ctx.axis, "backward")
        return None, None, None, *found


def _led(whole: Tensor, way: Sequence[Step]) -> Tensor:
    for target, rest in way:
        whole = target(whole, *rest)
    return whole
