"""A default group that the user made is completed, or refused; each kind of memory has a group of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from passes.errors import PlanError
from planner.mesh import Mesh
from runtime.distributed.default_group import can_carry
from runtime.distributed.opening import open_groups
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

GLOO = {"cpu": "gloo", "cuda": "gloo"}
NCCL = {"cuda": "nccl"}
BOTH = {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("backends", "device", "backend", "expected"),
    [
        (GLOO, "cpu", "gloo", True),
        (GLOO, "cuda", "gloo", True),  # ranks that share a GPU
        (GLOO, "cuda", "nccl", False),
        (NCCL, "cuda", "nccl", True),
        (NCCL, "cuda", "gloo", False),
        (BOTH, "cpu", "gloo", True),
        (BOTH, "cuda", "nccl", True),
        (BOTH, "cuda", "gloo", False),
        (BOTH | {"xpu": "xccl"}, "cuda", "nccl", True),
    ],
    ids=str,
)
def test_the_default_group_carries_the_device_or_one_is_made_beside_it(backends, device, backend, expected):
    assert can_carry(backends, device, backend) is expected


@pytest.mark.parametrize(
    ("backends", "device", "backend", "told"),
    [
        (NCCL, "cpu", "gloo", "uses only NCCL, but this run computes on the CPU"),
        ({"cpu": "mpi", "cuda": "mpi"}, "cuda", "nccl", "uses mpi"),
        ({"cpu": "fake", "cuda": "fake"}, "cpu", "gloo", "uses fake"),
    ],
    ids=str,
)
def test_a_default_group_that_cannot_be_completed_is_refused(backends, device, backend, told):
    with pytest.raises(PlanError, match=f"the default process group {told}") as caught:
        can_carry(backends, device, backend)
    assert "initialize it with" in caught.value.fix


def open_in(backend: str) -> tuple[list[int], bool, bool]:
    """What crosses the host group and the tp group, whether the default group is both, and whether it stays."""
    dist.init_process_group(backend)
    groups = open_groups(Mesh(tp=2), {}, [], timeout_seconds=HANG_SECONDS)
    seen = [0, 0]
    dist.all_gather_object(seen, groups.rank + 1, group=groups.host)
    total = torch.ones(1)
    dist.all_reduce(total, group=groups.over("tp"))
    is_default = groups.host is groups.world is dist.group.WORLD
    groups.close()
    return [*seen, int(total)], is_default, dist.is_initialized()


@pytest.mark.slow
def test_a_users_gloo_group_is_host_and_device_group_on_the_cpu_and_stays():
    for backend in ("gloo", "cpu:gloo"):
        assert Ranks(2, "processes").run(open_in, backend) == [([1, 2, 2], True, True)] * 2
