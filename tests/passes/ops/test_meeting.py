"""Rows of experts with axes of their own: the host waits once a layer, and all experts are multiplied in one call."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from passes.ops import meeting
from passes.ops.axis import AxisHandle
from passes.ops.counts import ExpertLoad
from passes.ops.meeting import Meeting
from planner.mesh import Mesh
from runtime.distributed.opening import open_groups
from tests.tools.expert_rows import permute, route
from tests.tools.host_watch import HostWatch, Sight
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

EXPERTS, TOKENS, WIDTH = 8, 16, 8


def axes(rank: int, ep: int, etp: int) -> tuple[AxisHandle, AxisHandle]:
    groups = [dist.new_group([e * etp + t for e in range(ep)]) for t in range(etp)]
    of_etp = [dist.new_group([e * etp + t for t in range(etp)]) for e in range(ep)]
    handles = AxisHandle("ep", ep, rank // etp), AxisHandle("etp", etp, rank % etp)
    handles[0].group, handles[1].group = groups[rank % etp], of_etp[rank // etp]
    return handles


def met(rank: int, ep: int, etp: int, nodes: int = 0) -> tuple[Tensor, Meeting]:
    """The rows of this rank's experts. ``nodes``: over which tokens go once; 0: rows go one by one."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    order, counts = route(torch.rand(TOKENS, EXPERTS, generator=generator).topk(2).indices, EXPERTS)
    rows = permute(x, order, 2)
    load = ExpertLoad((), (), 0)
    load.note = lambda layer, counts: None
    of_tokens = (order // 2, TOKENS, nodes) if nodes else ()
    here = meeting.meet(counts, len(rows), AxisHandle("tp", 1, 0), *axes(rank, ep, etp), load, 0, *of_tokens)
    return meeting.dispatch_tokens(x, here) if nodes else meeting.dispatch(rows, here), here


def sights_of_a_layer(ep: int, etp: int, nodes: int) -> list[Sight]:
    """Of a rank that is a process: ranks that are threads exchange by reading values."""
    groups = open_groups(Mesh(dp=ep * etp), {}, [], timeout_seconds=HANG_SECONDS)
    stages: Any = SimpleNamespace(stages=[])
    with HostWatch(stages) as watch:
        watch.has_begun = True
        rows, here = met(groups.rank, ep, etp, nodes)
        assert len(meeting.ids_of(here, 2 * TOKENS)) == len(rows)
        weights = torch.ones(EXPERTS // ep, WIDTH, WIDTH, requires_grad=True)
        made = meeting.grouped_mm(rows, weights, here)
        back = meeting.combine(made, here, made.dtype) if nodes else meeting.give_back(made, here)
        back.backward(torch.ones_like(back))
    groups.close()
    return watch.sights


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("ep", "etp", "nodes"), [(2, 1, 0), (2, 2, 0), (2, 2, 1), (4, 1, 2)])
def test_the_host_waits_once_a_layer(ep: int, etp: int, nodes: int):
    for sights in Ranks(ep * etp, "processes").run(sights_of_a_layer, ep, etp, nodes):
        assert [sight.kind for sight in sights] == ["stop"], sights


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (2, 2)])
def test_each_row_has_the_expert_that_its_place_says(ep: int, etp: int):
    def run(rank: int) -> tuple[list[int], list[int]]:
        _, here = met(rank, ep, etp)
        expected = torch.arange(EXPERTS // ep).repeat_interleave(torch.tensor(here.sizes))
        return meeting.ids_of(here, 2 * TOKENS).tolist(), expected.tolist()

    for found, expected in Ranks(ep * etp).run(run):
        assert found == expected


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += any(name in str(func) for name in ("aten.mm", "aten._grouped_mm"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_for_all_experts_is_the_products_one_by_one(dtype: torch.dtype):
    """The kernel of GPUs was not run: here its implementation for the CPU is."""
    ((rows, here),) = Ranks(1).run(lambda rank: met(rank, 1, 1))
    rows = rows.detach().to(dtype)
    weights = torch.randn(EXPERTS, WIDTH, 2 * WIDTH, dtype=dtype)
    found = []
    for product in (meeting.grouped_mm, meeting.of_groups):
        x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        with _Products() as products:
            y = product(x, w, here)
        found.append((y.detach(), *torch.autograd.grad(y, (x, w), y.detach())))
        assert products.num == (EXPERTS if product is meeting.grouped_mm else 1)
    for one_by_one, together in zip(*found, strict=True):
        torch.testing.assert_close(together, one_by_one)
