"""Ways to be wrong: each takes a function that exchanges, and returns one that leaves it out, doubles it, or runs it
over another axis.

An all-gather that is doubled brings the same values again, and is no fault. Where a result is another tensor than what
went in, ``left_out`` is given the stand-in: this rank's own values in the place of those of others.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from passes.ops.axis import has_values
from passes.ops.collectives import part
from tests.tools.planted.fault import Function, Make, on_other_axis, other_group

# ---- all_reduce(x, axis, phase, op, owned=) and what has the same signature


def sum_left_out(whole: Function) -> Function:
    return lambda x, axis, *rest, **options: x.clone()


def sum_twice(whole: Function) -> Function:
    return lambda x, *rest, **options: whole(whole(x, *rest, **options).clone(), *rest, **options)


def on_wrong_axis(whole: Function) -> Function:
    """Of any function whose second argument is the axis."""
    return lambda x, axis, *rest, **options: whole(x, on_other_axis(axis), *rest, **options)


def started_sum_twice(whole: Function) -> Function:
    def started(x: Tensor, axis: Any, phase: str) -> Any:
        if (work := whole(x, axis, phase)) is not None:  # None: there is nothing to exchange, as in planning
            work.wait()
        return whole(x, axis, phase)

    return started


# ---- methods of autograd functions: forward(ctx, x, axis, …), backward(ctx, gradient)


def forward_left_out(stand_in: Function) -> Make:
    def make(whole: Function) -> Function:
        def forward(ctx: Any, x: Tensor, axis: Any, *rest: Any) -> Tensor:
            ctx.axis, ctx.cut = axis, rest[0] if rest else None
            return stand_in(x, axis, *rest)

        return forward

    return make


def forward_twice(whole: Function) -> Function:
    def forward(ctx: Any, x: Tensor, axis: Any, *rest: Any) -> Tensor:
        out = whole(ctx, x, axis, *rest)
        if has_values(out):
            dist.all_reduce(out, group=axis.group)
        return out

    return forward


def forward_on_wrong_axis(whole: Function) -> Function:
    def forward(ctx: Any, x: Tensor, axis: Any, *rest: Any) -> Tensor:
        out = whole(ctx, x, on_other_axis(axis), *rest)
        ctx.axis = axis
        return out

    return forward


def backward_left_out(stand_in: Function) -> Make:
    """``stand_in(gradient, ctx)``: what comes back in the place of the exchanged gradient."""

    def make(whole: Function) -> Function:
        return lambda ctx, *grads: (stand_in(grads[0], ctx), *whole(ctx, *grads)[1:])

    return make


def backward_summed_twice(whole: Function) -> Function:
    """Each rank's addend counts twice."""

    def backward(ctx: Any, *grads: Any) -> Any:
        gradient, *rest = whole(ctx, *grads)
        return (gradient * 2, *rest)

    return backward


def backward_on_wrong_axis(whole: Function) -> Function:
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.axis = on_other_axis(ctx.axis)
        return whole(ctx, *grads)

    return backward


# ---- what a rank has without the others


def as_it_is(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.clone()


def gradient_as_it_is(gradient: Tensor, ctx: Any) -> Tensor:
    return gradient


def own_again(x: Tensor, axis: Any, cut: Any, *_: Any, **__: Any) -> Tensor:
    """The whole, in which every rank's part is this one's. For parts without padding and whole segments."""
    return x.repeat_interleave(axis.size, cut.dim) if cut.padding or len(cut.segments) > 1 else _repeated(x, axis, cut)


def _repeated(x: Tensor, axis: Any, cut: Any) -> Tensor:
    return x.repeat([axis.size if d == cut.dim else 1 for d in range(x.dim())])


def gradient_again(gradient: Tensor, ctx: Any) -> Tensor:
    return own_again(gradient, ctx.axis, ctx.cut)


def own_part(x: Tensor, axis: Any, cut: Any, *_: Any, **__: Any) -> Tensor:
    return part(x, cut, axis.size, axis.rank).contiguous()


def own_part_of_gradient(gradient: Tensor, ctx: Any) -> Tensor:
    return part(gradient, ctx.cut, ctx.axis.size, ctx.axis.rank, 0).contiguous()


def ended_at_once(stand_in: Function) -> Make:
    """Of an exchange that is started here and ended elsewhere: what is given back ends it."""
    return lambda whole: lambda *args, **options: lambda: stand_in(*args)


def ended_twice(whole: Function) -> Function:
    def started(*args: Any, **options: Any) -> Function:
        end = whole(*args, **options)
        return lambda: end() * 2

    return started


# ---- collectives over a process group: collective(…, group=, async_op=)


class Done:
    def wait(self) -> None:
        """Nothing was started."""


def call_left_out(whole: Function) -> Function:
    return lambda *args, **options: Done()


def call_twice(whole: Function) -> Function:
    def twice(*args: Any, group: Any, async_op: bool = False) -> Any:
        whole(*args, group=group)
        return whole(*args, group=group, async_op=async_op)

    return twice


def call_on_wrong_axis(whole: Function) -> Function:
    def call(*args: Any, group: Any, async_op: bool = False) -> Any:
        return whole(*args, group=other_group(group), async_op=async_op)

    return call
