"""The collectives between types, as autograd functions: the pair of types decides each backward.

    name      types   forward                      backward
    f         I → R   nothing                      all-reduce
    g         P → I   all-reduce                   nothing
    g_f       P → R   all-reduce                   all-reduce
    slice     I → V   this rank's part             all-gather
    cut       R → V   this rank's part             zeros elsewhere
    gather    V → R   all-gather                   reduce-scatter
    collect   V → I   all-gather                   this rank's part
    scatter   P → V   reduce-scatter               all-gather
    first     I → P   kept on rank 0, else zeros   nothing
    exchange  V → V   all-to-all                   all-to-all: the cut goes to another dim

If a dim has padding, a value is padded with copies of its last element, which is finite wherever the model is; a
gradient is padded with zeros. Gathering leaves the padding out.

Every call is counted on the axis handle, so that a run can be held against the plan. Tensors without values, as in
planning, have a shape and nothing to exchange.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from passes.ops.axis import (
    AxisHandle,
    Way,
    all_gather_single,
    gather_runs,
    has_values,
    reduce_scatter_single,
    scatter_runs,
)
from passes.types.types import Placement

Tensor = torch.Tensor
Ending = Callable[[], Tensor]


def all_reduce(x: Tensor, axis: AxisHandle, phase: str, op: Any = None, *, owned: bool = False) -> Tensor:
    """Sum (or ``op``) over the axis. ``owned``: x may be overwritten. gloo sums a non-contiguous x wrongly."""
    note(axis, "all_reduce", phase, x)
    out = x.contiguous()
    if out is x and not owned:
        out = x.clone()
    if axis.size > 1 and has_values(x):
        dist.all_reduce(out, op=op or dist.ReduceOp.SUM, group=axis.group)
    return out


def start_all_reduce(x: Tensor, axis: AxisHandle, phase: str) -> Any:
    """Begin to sum a contiguous ``x`` in place; await the returned work before reading x. None: nothing to do."""
    note(axis, "all_reduce", phase, x)
    return dist.all_reduce(x, group=axis.group, async_op=True) if axis.size > 1 and has_values(x) else None


def all_gather(x: Tensor, axis: AxisHandle, cut: Placement, phase: str) -> Tensor:
    """Return the full tensor from the ranks' parts, segment by segment."""
    return start_all_gather(x, axis, cut, phase)()


def start_all_gather(x: Tensor, axis: AxisHandle, cut: Placement, phase: str, *, ahead: bool = False) -> Ending:
    """Begin to gather; the returned function ends it and gives the full tensor. ``ahead``: other work follows."""
    note(axis, "all_gather", phase, x, axis.size)
    own = x.contiguous()
    if cut.in_place(x.shape):
        whole = x.new_empty([n * axis.size if d == cut.dim else n for d, n in enumerate(x.shape)])
        runs = cut.num_runs(x.shape)
        works = gather_runs(whole, own, runs, group=axis.group, async_op=ahead) if has_values(x) else []
        return partial(ended, works, whole)
    parts = x.new_empty((axis.size, *x.shape))
    work = None
    if has_values(x):
        work = all_gather_single(parts.view(-1), own.view(-1), group=axis.group, async_op=ahead)
    return lambda: _joined(list(ended([work], parts).unbind(0)), axis, cut)


def all_to_all(x: Tensor, axis: AxisHandle, before: Placement, after: Placement, phase: str) -> Tensor:
    """Move a part of one dim to a part of another: each rank sends every rank its slice of the own part."""
    note(axis, "all_to_all", phase, x, axis.size)
    sent = torch.stack([part(x, after, axis.size, rank) for rank in range(axis.size)]).contiguous()
    received = torch.empty_like(sent)
    if has_values(x):
        dist.all_to_all_single(received, sent, group=axis.group)
    return _joined(list(received.unbind(0)), axis, before)


def _joined(parts: list[Tensor], axis: AxisHandle, cut: Placement) -> Tensor:
    """Return the full dim from every rank's part of it, segment by segment, without padding."""
    sizes = [stop - start for start, stop in cut.slices(axis.size, 0)]
    pieces = [
        [piece.narrow(cut.dim, 0, n) for piece, n in zip(p.split(sizes, cut.dim), of_data, strict=True)]
        for p, of_data in zip(parts, (cut.data_sizes(axis.size, rank) for rank in range(axis.size)), strict=True)
    ]
    return torch.cat([of_rank[s] for s in range(len(sizes)) for of_rank in pieces], cut.dim)


def reduce_scatter(x: Tensor, axis: AxisHandle, cut: Placement, phase: str, *, of_gradient: bool = False) -> Tensor:
    """Return this rank's part of the sum of the ranks' full tensors, which are a value's or a gradient's."""
    return start_reduce_scatter(x, axis, cut, phase, of_gradient=of_gradient)()


def start_reduce_scatter(
    x: Tensor, axis: AxisHandle, cut: Placement, phase: str, *, of_gradient: bool = False, ahead: bool = False
) -> Ending:
    """Begin to sum; the returned function ends it and gives this rank's part. ``ahead``: other work runs in between."""
    out, beyond = x.new_empty(cut.local_shape(tuple(x.shape), axis.size)), 0 if of_gradient else None
    note(axis, "reduce_scatter", phase, out, axis.size)
    if not has_values(x):
        return partial(ended, [], out)
    if cut.in_place(x.shape):
        runs = cut.num_runs(x.shape)
        return partial(ended, scatter_runs(out, x.contiguous(), runs, group=axis.group, async_op=ahead), out)
    # parts of an image that lies with its channels last stack up without being contiguous
    parts = torch.stack([part(x, cut, axis.size, rank, beyond) for rank in range(axis.size)]).contiguous()
    return partial(ended, [reduce_scatter_single(out.view(-1), parts.view(-1), group=axis.group, async_op=ahead)], out)


def ended(works: Sequence[Any], result: Tensor) -> Tensor:
    """Return ``result``, once these works are done; None is no work."""
    for work in works:
        if work is not None:
            work.wait()
    return result


def part(x: Tensor, cut: Placement, size: int, rank: int, beyond: int | None = None) -> Tensor:
    """The part of ``rank`` of a full tensor, as ``cut`` says. The padding holds ``beyond``; None: the last element."""
    pieces = []
    for (start, stop), num_data in zip(cut.slices(size, rank), cut.data_sizes(size, rank), strict=True):
        if num_data:
            pieces.append(x.narrow(cut.dim, start, num_data))
        if num_data < stop - start:
            pieces.append(_filling(x, cut.dim, stop - start - num_data, beyond))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)


def _own(x: Tensor, cut: Placement, axis: AxisHandle, beyond: int | None = None) -> Tensor:
    """Return this rank's part, contiguous."""
    own = part(x, cut, axis.size, axis.rank, beyond)
    return _copy(own) if cut.padding else own.contiguous()


def _copy(own: Tensor) -> Tensor:
    """A copy of a rank's part, even if a view would do: then all ranks save equally much, with padding or without."""
    return own.clone(memory_format=torch.contiguous_format)


def _filling(x: Tensor, dim: int, length: int, beyond: int | None) -> Tensor:
    shape = [length if d == dim else n for d, n in enumerate(x.shape)]
    return x.narrow(dim, -1, 1).expand(shape) if beyond is None else x.new_full(shape, beyond)


def note(axis: AxisHandle, kind: str, phase: str, x: Tensor, times: int = 1) -> None:
    """Count one collective, of ``times`` x."""
    axis.note(kind, phase, x.numel() * x.element_size() * times)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: AxisHandle, owned: bool) -> Tensor:
        out = all_reduce(x, axis, "forward", owned=owned)
        if out is x:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def f(x: Tensor, axis: AxisHandle) -> Tensor:
    """Sum the gradient over ranks: stands before a column-parallel linear."""
    return Way.apply(x, _same, partial(all_reduce, axis=axis, phase="backward"))


def g(x: Tensor, axis: AxisHandle, owned: bool = False) -> Tensor:
    """Sum after a row-parallel linear, before its bias. ``owned``: no other op reads x, nor does the backward of its
    producer, so it is summed in place.
    """
    return _G.apply(x, axis, owned)


def g_f(x: Tensor, axis: AxisHandle) -> Tensor:
    there, back = (partial(all_reduce, axis=axis, phase=phase) for phase in ("forward", "backward"))
    return Way.apply(x, there, back)


def slice_part(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    return Way.apply(x, partial(_own, cut=cut, axis=axis), partial(all_gather, axis=axis, cut=cut, phase="backward"))


def cut_part(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    """Return this rank's part; its gradient elsewhere is zero, as another rank has it."""
    own = part(x, cut, axis.size, axis.rank)
    return _copy(own) if cut.padding else own


def gather(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    back = partial(reduce_scatter, axis=axis, cut=cut, phase="backward", of_gradient=True)
    return Way.apply(x, partial(all_gather, axis=axis, cut=cut, phase="forward"), back)


def collect(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    back = partial(_own, cut=cut, axis=axis, beyond=0)
    return Way.apply(x, partial(all_gather, axis=axis, cut=cut, phase="forward"), back)


def scatter(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    back = partial(all_gather, axis=axis, cut=cut, phase="backward")
    return Way.apply(x, partial(reduce_scatter, axis=axis, cut=cut, phase="forward"), back)


def first(x: Tensor, axis: AxisHandle) -> Tensor:
    """Keep x on rank 0 alone; the gradient is the same on all ranks already."""
    return Way.apply(x, _same if axis.rank == 0 else torch.zeros_like, _same)


def exchange(x: Tensor, axis: AxisHandle, before: Placement, after: Placement) -> Tensor:
    there = partial(all_to_all, axis=axis, before=before, after=after, phase="forward")
    return Way.apply(x, there, partial(all_to_all, axis=axis, before=after, after=before, phase="backward"))


BY_NAME = {
    "f": f,
    "g": g,
    "g f": g_f,
    "slice": slice_part,
    "cut": cut_part,
    "gather": gather,
    "collect": collect,
    "scatter": scatter,
    "first": first,
    "exchange": exchange,
}
TAKES_CUT = {"slice", "cut", "gather", "collect", "scatter"}
