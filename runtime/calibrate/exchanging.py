"""Measure the links between ranks: the collectives of a training step over all ranks and over pairs, at a few sizes.

``work`` is the bytes of the full tensor: for an all-reduce, the tensor of each rank; for an all-gather, that of each
rank after it, for a reduce-scatter before it; for p2p, the message that each rank sends while it receives one.

Before each exchange stands a product, as in a step: ranks that share cores come to it at different times, and wait.
The time of the product alone is reported too, to be subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from passes.ops.runs import all_gather_single, reduce_scatter_single
from planner.mesh import Mesh
from runtime.calibrate.found import Timed
from runtime.calibrate.timing import Clock
from runtime.distributed.groups import Groups

_ON_CPU = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_ON_CUDA = (1 << 16, 1 << 19, 1 << 22, 1 << 25, 1 << 28)
_LEAST_WITH_PAIRS = 4  # ranks: of fewer a pair is all

_Call = tuple[str, Callable[[], object]]


def measured_mesh(size: int) -> tuple[Mesh, tuple[str, ...]]:
    """A mesh with a group of all ranks and, if they are more, one of each pair; and the axes to combine for it."""
    with_pairs = size >= _LEAST_WITH_PAIRS and size % 2 == 0
    return (Mesh(tp=2, dp=size // 2), ("tp-dp",)) if with_pairs else (Mesh(dp=size), ())


def _all_ranks(groups: Groups) -> ProcessGroup | None:
    return groups.over("tp-dp") or groups.dp  # as a step has it: ranks of one host may share memory


def product(clock: Clock) -> Callable[[], Tensor]:
    """The matrix product that runs before each exchange."""
    m = 4096 if clock.device.type == "cuda" else 384
    x, weight = torch.full((m, m), 0.5, device=clock.device), torch.full((m, m), 0.5, device=clock.device)
    return lambda: F.linear(x, weight)


def exchanges(clock: Clock) -> Iterator[Timed]:
    """Every kind at every size, in bytes, with the product before it."""
    size, before = clock.groups.mesh.world_size, product(clock)
    for num_bytes in _ON_CUDA if clock.device.type == "cuda" else _ON_CPU:
        whole = torch.zeros(num_bytes // 4 // size * size, device=clock.device)
        calls = [(size, *call) for call in _collectives(whole, _all_ranks(clock.groups), size)]
        if clock.groups.tp is not None:
            calls += [(2, *call) for call in _collectives(whole, clock.groups.tp, 2)]
        for ranks, kind, call in (*calls, (2, "p2p", _to_the_next(clock, whole))):
            seconds = clock.seconds(lambda call=call: (before(), call()))
            yield Timed(kind, 4.0 * whole.numel(), seconds, ranks=ranks)


def _collectives(whole: Tensor, group: ProcessGroup | None, size: int) -> list[_Call]:
    part = torch.zeros(whole.numel() // size, device=whole.device)
    return [
        ("all_reduce", lambda: dist.all_reduce(whole, group=group)),
        ("all_gather", lambda: all_gather_single(whole, part, group=group)),
        ("reduce_scatter", lambda: reduce_scatter_single(part, whole, group=group)),
    ]


def _to_the_next(clock: Clock, sent: Tensor) -> Callable[[], object]:
    rank, size = clock.groups.rank, clock.groups.mesh.world_size
    group, received = clock.groups.world, torch.empty_like(sent)

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size, group),
            dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


def overlap(clock: Clock) -> tuple[float, float, float]:
    """Seconds of a product, of an all-reduce that takes about as long, and of both at once."""
    num_bytes = 1 << 28 if clock.device.type == "cuda" else 1 << 22
    whole = torch.zeros(num_bytes // 4, device=clock.device)
    group, call = _all_ranks(clock.groups), product(clock)
    exchange = clock.seconds(lambda: dist.all_reduce(whole, group=group))
    alone = clock.seconds(call)
    times = max(1, round(exchange / alone))

    def both() -> None:
        work = dist.all_reduce(whole, group=group, async_op=True)
        for _ in range(times):
            call()
        assert work is not None
        work.wait()

    return times * alone, exchange, clock.seconds(both)
