"""One mesh axis as a collective in a graph sees it, the precision of sums over ranks, exchanges of contiguous memory.

All-gathers and reduce-scatters go straight from and to the memory of their parts:

    cut along the first dim, or behind dims of size 1      one run of memory      one call
    behind dims of b elements                              b runs                 b calls, which NCCL takes as one

A run of the full tensor holds the ranks' runs behind each other, so nothing is copied on either side.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _coalescing_manager

from passes.program.ops.aten import HALF

# torch 2.13 deprecates the names that are the only ones in 2.11
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def has_values(x: Tensor) -> bool:
    """Whether there is anything to exchange: meta tensors and fake ones have shapes alone, as planning runs the ops."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def widened(x: Tensor) -> Tensor:
    """``x`` in float32 if it is of half precision: sums over ranks are taken in no less."""
    return x.float() if x.dtype in HALF else x


class AxisHandle:
    """One mesh axis as a lowered graph sees it: size and rank are known, the runtime binds the process group.

    Owns: the count of every collective that ran, by (kind, phase), for checks against the plan. ``phase``: overrides
    that of all calls while a backward recomputes a forward.
    """

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.name = name
        self.size = size
        self.rank = rank
        self.group: Any = None
        self.phase: str | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, phase: str, size: int) -> None:
        """Count one collective of ``size`` bytes."""
        phase = self.phase or phase
        self.counts[kind, phase] += 1
        self.bytes[kind, phase] += size

    def __repr__(self) -> str:
        return f"{self.name}[{self.rank}/{self.size}]"


ALONE = AxisHandle("alone", 1, 0)  # of a rank that has all of a value


def own_part(length: int, axis: AxisHandle | None, size: int) -> tuple[int, int]:
    """The first of ``size`` elements that this rank has, and how many of its ``length`` are no padding behind them."""
    start = 0 if axis is None else axis.rank * length
    return start, max(0, min(length, size - start))


class Way(torch.autograd.Function):
    """A value goes one way, ``there``, and its gradient the other, ``back``. Neither may hold the value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.back(grads[0]), None, None


def reduce_scatter_single(out: Tensor, whole: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """Write into ``out`` this rank's part of the sum of flat tensors, which hold the ranks' parts behind each other."""
    return getattr(dist, REDUCE_SCATTER)(out, whole, group=group, async_op=async_op)


def all_gather_single(whole: Tensor, own: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """Write into ``whole``, flat, the ranks' flat parts behind each other."""
    return getattr(dist, ALL_GATHER)(whole, own, group=group, async_op=async_op)


def gather_runs(whole: Tensor, own: Tensor, num_runs: int, *, group: Any, async_op: bool = False) -> list[Any]:
    """Write into each of the ``num_runs`` equal runs of ``whole`` the ranks' runs of ``own`` behind each other."""
    return _each_run(all_gather_single, whole, own, num_runs, group, async_op)


def scatter_runs(out: Tensor, whole: Tensor, num_runs: int, *, group: Any, async_op: bool = False) -> list[Any]:
    """Write into each run of ``out`` this rank's part of the sum of the ranks' runs of ``whole``."""
    return _each_run(reduce_scatter_single, out, whole, num_runs, group, async_op)


def _each_run(call: Any, to: Tensor, given: Tensor, num_runs: int, group: Any, async_op: bool) -> list[Any]:
    """Call the collective for each run; returns the works to wait for."""
    pairs = list(zip(to.view(num_runs, -1).unbind(0), given.view(num_runs, -1).unbind(0), strict=True))
    if num_runs == 1:
        return [call(*pairs[0], group=group, async_op=async_op)]
    with _as_one(group, given, async_op) as joint:
        works = [call(*pair, group=group, async_op=async_op) for pair in pairs]
    return works if joint is None else [joint] if async_op else []


def _as_one(group: Any, x: Tensor, async_op: bool) -> AbstractContextManager[Any]:
    """Return a context with one launch for all calls inside, if the backend of ``x``'s device supports it (NCCL)."""
    group = group if group is not None else dist.group.WORLD
    if not x.is_cuda or not group._get_backend(x.device).supports_coalescing:
        return nullcontext()
    return _coalescing_manager(group, None, async_op)
