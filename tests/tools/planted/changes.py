"""Ways to be wrong: each takes a function that exchanges, and returns one that leaves it out, doubles it, or runs it
over another axis.

An all-gather that is doubled brings the same values again, and is no fault. Where a result is another tensor than what
went in, ``left_out`` is given the stand-in: this rank's own values in the place of those of others.
"""

import sys
from functools import partial
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


# ---- the forward of an autograd function: forward(ctx, x, axis, …)


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


# ---- passes.ops.axis.Way, as a module calls it: the ways of its functions ``names``, as partials over axis and cut


def way_of(*names: str, there: Make | None = None, back: Make | None = None) -> Make:
    """``there``, ``back``: take that way, and return another."""

    def make(whole: Any) -> Any:
        class Wrong:
            @staticmethod
            def apply(x: Tensor, forward: Function, backward: Function) -> Tensor:
                if sys._getframe(1).f_code.co_name in names:
                    forward, backward = (there or _as_given)(forward), (back or _as_given)(backward)
                return whole.apply(x, forward, backward)

        return Wrong

    return make


def _as_given(move: Function) -> Function:
    return move


def left_out(stand_in: Function) -> Make:
    return lambda move: lambda x: stand_in(x, **move.keywords)


def added_again(move: Function) -> Function:
    """Each rank's addend counts twice."""
    return lambda x: move(x) * 2


def summed_again(move: Any) -> Function:
    def moved(x: Tensor) -> Tensor:
        out = move(x)
        if has_values(out):
            dist.all_reduce(out, group=move.keywords["axis"].group)
        return out

    return moved


def elsewhere(move: Any) -> Function:
    """Over another axis."""
    return partial(move.func, **{**move.keywords, "axis": on_other_axis(move.keywords["axis"])})


# ---- what a rank has without the others


def as_it_is(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.clone()


def own_again(x: Tensor, axis: Any, cut: Any, *_: Any, **__: Any) -> Tensor:
    """The whole, in which every rank's part is this one's. For parts without padding and whole segments."""
    return x.repeat_interleave(axis.size, cut.dim) if cut.padding or len(cut.segments) > 1 else _repeated(x, axis, cut)


def _repeated(x: Tensor, axis: Any, cut: Any) -> Tensor:
    return x.repeat([axis.size if d == cut.dim else 1 for d in range(x.dim())])


def own_part(x: Tensor, axis: Any, cut: Any, *_: Any, **__: Any) -> Tensor:
    return part(x, cut, axis.size, axis.rank).contiguous()


def own_part_of_gradient(gradient: Tensor, axis: Any, cut: Any, *_: Any, **__: Any) -> Tensor:
    return part(gradient, cut, axis.size, axis.rank, 0).contiguous()


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
