"""Measurements of calls: their work, and their seconds while all ranks run them.

Ranks on one machine share its cores and its memory: they start together, make the same number of calls, and the slowest
rank counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from runtime.distributed.groups import Groups

_LEAST = 0.001  # minimum fraction of a measured time that remains after a subtraction
_MOST_CALLS = 20_000


@dataclass(frozen=True, slots=True)
class Timed:
    """A timed call. ``work``: FLOPs, bytes read and written, or bytes of the full tensor of a collective.

    ``sides``: m, k and n of a product. ``ranks``: group size of a collective.
    """

    name: str
    work: float
    seconds: float
    sides: tuple[int, int, int] | None = None
    ranks: int = 0

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / self.seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured machine. ``cores``: shared by the ranks; 0: one device per rank. ``memory``: bytes per rank.
    ``load``: the load average before. For a GPU: ``processors``; ``context``: bytes of the driver; ``slack``: bytes
    that the allocator reserves beyond tensors, as a fraction of the tensors (None: unknown); ``cudnn``: torch prefers
    cuDNN for attention.
    """

    device: str
    backend: str
    num_ranks: int
    cores: int
    memory: int
    load: float = 0.0
    torch: str = ""
    processors: int = 0
    context: int = 0
    slack: float | None = None
    cudnn: bool = False

    @property
    def sharing(self) -> float:
        """Number of ranks per core, at least 1."""
        return max(1.0, self.num_ranks / self.cores) if self.cores else 1.0


@dataclass(frozen=True, slots=True)
class Measurements:
    """All measurements. Products are named by their dtype, exchanges by their kind. ``before``: the product that runs
    before each exchange, timed alone. ``overlap``: seconds of products, of an exchange, and of both at once.
    """

    machine: Machine
    products: tuple[Timed, ...]
    attention: tuple[Timed, ...]
    moved: tuple[Timed, ...]
    small: Timed
    exchanges: tuple[Timed, ...] = ()
    before: Timed | None = None
    overlap: tuple[float, float, float] | None = None
    skipped: tuple[str, ...] = ()

    @property
    def exchanged(self) -> tuple[Timed, ...]:
        """The exchanges, without the product before each."""
        beside = 0.0 if self.before is None else self.before.seconds
        return tuple(replace(t, seconds=max(t.seconds - beside, _LEAST * t.seconds)) for t in self.exchanges)

    @classmethod
    def fastest(cls, passes: Sequence[Measurements]) -> Measurements:
        """Return the fastest of ``passes`` for each measurement of the first pass."""
        first = passes[0]
        return cls(
            first.machine,
            products=_fastest(each.products for each in passes),
            attention=_fastest(each.attention for each in passes),
            moved=_fastest(each.moved for each in passes),
            small=min((each.small for each in passes), key=lambda timed: timed.seconds),
            exchanges=_fastest(each.exchanges for each in passes),
            before=min((p.before for p in passes if p.before is not None), key=lambda t: t.seconds, default=None),
            overlap=min((p.overlap for p in passes if p.overlap is not None), key=sum, default=None),
            skipped=first.skipped,
        )


def _fastest(passes: Iterable[Sequence[Timed]]) -> tuple[Timed, ...]:
    first, *others = ({(timed.name, timed.work, timed.sides, timed.ranks): timed for timed in one} for one in passes)
    return tuple(
        replace(timed, seconds=min([timed.seconds, *(other[key].seconds for other in others if key in other)]))
        for key, timed in first.items()
    )


class Clock:
    """Times calls on all ranks. ``window``: seconds of one measurement; a single call may take longer."""

    def __init__(self, groups: Groups, window: float) -> None:
        self.groups, self.window = groups, window
        self.device = groups.device

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, the same on every rank."""
        first = self._timed(call, 1)  # includes one-time set-up; a slow call is not repeated
        once = self._timed(call, 1) if first < self.window else first
        count = min(_MOST_CALLS, int(self.window / once))
        return self._timed(call, count) if count > 1 else min(first, once)

    def _timed(self, call: Callable[[], object], count: int) -> float:
        """Return the seconds of one of ``count`` calls on the slowest rank."""
        several = self.groups.mesh.world_size > 1
        self._wait_for_device()
        if several:
            dist.barrier(group=self.groups.host)
        began = time.perf_counter()
        for _ in range(count):
            call()
        self._wait_for_device()
        seconds = torch.tensor([(time.perf_counter() - began) / count], dtype=torch.float64)
        if several:
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.groups.host)
        return float(seconds)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
