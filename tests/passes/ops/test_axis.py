"""Parts along a dim are exchanged from where they lie to where they go: no copy beside the message."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils._python_dispatch import TorchDispatchMode

from passes.ops import axis as runs
from passes.ops.axis import AxisHandle
from passes.ops.collectives import all_gather, gather, reduce_scatter, scatter, start_all_gather, start_reduce_scatter
from passes.types.types import V
from runtime.fuzz.forks import StoreHost
from tests.tools.ranks import Ranks

aten = torch.ops.aten
COPIES = (aten.cat.default, aten.stack.default, aten.clone.default)


class Copied(TorchDispatchMode):
    """Bytes that ops write which only lay out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COPIES:
            self.num_bytes[str(func)] += result.nbytes
        return result


def whole_of(b: int, s: int = 8, h: int = 6) -> Tensor:
    return torch.randn(b, s, h, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("b", [1, 2, 8])
def test_a_sequence_is_gathered_and_scattered_without_a_copy(b):
    whole, cut = whole_of(b), V(1, 8)

    def run(rank: int) -> tuple[Tensor, Tensor, Counter[str], AxisHandle]:
        axis = AxisHandle("tp", 4, rank)
        part = whole[:, 2 * rank : 2 * rank + 2].clone().requires_grad_()
        with Copied() as copied:
            gathered = gather(part, axis, cut)
            scattered = scatter(gathered, axis, cut)
            scattered.backward(torch.full_like(scattered, rank + 1.0))
        assert part.grad is not None
        expected = torch.arange(1.0, 5.0, dtype=torch.float64).repeat_interleave(2).view(8, 1).expand(8, 6)
        assert torch.equal(part.grad, 4 * expected[2 * rank : 2 * rank + 2].expand(b, 2, 6))
        return gathered.detach(), scattered.detach(), copied.num_bytes, axis

    for rank, (gathered, scattered, copied, axis) in enumerate(Ranks(4).run(run)):
        assert torch.equal(gathered, whole)
        torch.testing.assert_close(scattered, 4 * whole[:, 2 * rank : 2 * rank + 2])
        assert not copied
        assert all(count == 1 for count in axis.counts.values())


def test_parts_behind_each_other_are_sent_from_and_written_to_the_tensors_themselves(monkeypatch):
    """What a message reads is the value's memory, and its target the result's."""
    seen: list[tuple[int, int]] = []
    for name in ("all_gather_single", "reduce_scatter_single"):
        call = getattr(runs, name)

        def noted(to: Tensor, given: Tensor, *, call: Any = call, **named: Any) -> Any:
            seen.append((to.data_ptr(), given.data_ptr()))
            return call(to, given, **named)

        monkeypatch.setattr(runs, name, noted)
    x = whole_of(1)

    def run(rank: int) -> list[tuple[int, int]]:
        axis = AxisHandle("tp", 1, rank)
        gathered = all_gather(x, axis, V(1, 8), "forward")
        scattered = reduce_scatter(gathered, axis, V(1, 8), "forward")
        return [(gathered.data_ptr(), x.data_ptr()), (scattered.data_ptr(), gathered.data_ptr())]

    (expected,) = Ranks(1).run(run)
    assert seen == expected


def test_behind_many_rows_one_message_and_a_copy_are_left():
    whole, cut = whole_of(9), V(1, 8)

    def run(rank: int) -> tuple[Tensor, Counter[str]]:
        with Copied() as copied:
            gathered = all_gather(whole[:, 4 * rank : 4 * rank + 4], AxisHandle("tp", 2, rank), cut, "forward")
        return gathered, copied.num_bytes

    for gathered, copied in Ranks(2).run(run):
        assert torch.equal(gathered, whole)
        assert copied["aten.cat.default"] == whole.nbytes


def _as_nccl_would() -> list[Tensor]:
    """Gathered and scattered in one launch each, sync and async."""
    runs._as_one = lambda group, x, async_op: _coalescing_manager(dist.group.WORLD, None, async_op)
    rank = dist.get_rank()
    whole, cut, axis = whole_of(3), V(1, 8), AxisHandle("tp", 2, rank)
    part = whole[:, 4 * rank : 4 * rank + 4].contiguous()
    found = []
    for ahead in (False, True):
        found.append(start_all_gather(part, axis, cut, "forward", ahead=ahead)())
        found.append(start_reduce_scatter(whole, axis, cut, "forward", ahead=ahead)())
    return found


@pytest.mark.slow
def test_runs_taken_as_one_launch_give_the_same():
    whole = whole_of(3)
    for rank, found in enumerate(Ranks(2, "forks", StoreHost()).run(_as_nccl_would)):
        own = 2 * whole[:, 4 * rank : 4 * rank + 4]
        for gathered, scattered in (found[:2], found[2:]):
            assert torch.equal(gathered, whole)
            assert torch.equal(scattered, own)
