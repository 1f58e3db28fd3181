"""Process groups over a mesh: members, embedding groups, links, and the errors of the first meeting."""

import json
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from passes.errors import PlanError
from planner.mesh import Mesh
from runtime.distributed import opening
from runtime.distributed.default_group import can_carry
from runtime.distributed.groups import Groups
from runtime.distributed.opening import open_groups
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks


def members(group) -> list[int]:
    return dist.get_process_group_ranks(group) if group is not None else []


def open_mesh(sizes: dict, tied: list[tuple[int, ...]]) -> Groups:
    return open_groups(Mesh(**sizes), {"seed": "1"}, tied, timeout_seconds=HANG_SECONDS)


def groups_of_rank(sizes: dict, tied: list[tuple[int, ...]]) -> dict:
    groups = open_mesh(sizes, tied)
    found = {axis: members(groups.over(axis)) for axis in ("tp", "cp", "dp", "dp-cp", "pp", "world")}
    found["name"] = groups.faults.activity.name
    found["embedding"] = {stages: members(groups.over(stages)) for stages in tied}
    found["next"] = groups.rank_of_stage(groups.place["pp"] + 1)
    groups.close()
    found["closed"] = not dist.is_initialized()
    return found


@pytest.mark.slow
def test_groups_of_tp2_pp2_dp2():
    found = Ranks(8, "processes").run(groups_of_rank, {"tp": 2, "pp": 2, "dp": 2}, [(0, 1)])
    assert [r["tp"] for r in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [r["dp"] for r in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [r["pp"] for r in found] == [[0, 4], [1, 5], [2, 6], [3, 7]] * 2
    assert [r["embedding"] for r in found] == [{(0, 1): r["pp"]} for r in found]
    assert [r["next"] for r in found] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert all(r["world"] == list(range(8)) and r["closed"] for r in found)


@pytest.mark.slow
def test_with_a_cp_gradients_have_a_group_of_their_own_over_dp_and_cp():
    found = Ranks(4, "processes").run(groups_of_rank, {"cp": 2, "dp": 2}, [])
    assert [r["cp"] for r in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [r["dp"] for r in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [r["dp-cp"] for r in found] == [[0, 1, 2, 3]] * 4
    assert [r["name"] for r in found][1] == "rank 1 (tp 0 · cp 1 · pp 0 · dp 0)"


@pytest.mark.slow
def test_an_embedding_group_holds_only_the_stages_of_its_parameter():
    found = Ranks(4, "processes").run(groups_of_rank, {"pp": 4}, [(0, 3), (1, 2, 3)])
    assert [r["embedding"] for r in found] == [
        {(0, 3): [0, 3], (1, 2, 3): []},
        {(0, 3): [], (1, 2, 3): [1, 2, 3]},
        {(0, 3): [], (1, 2, 3): [1, 2, 3]},
        {(0, 3): [0, 3], (1, 2, 3): [1, 2, 3]},
    ]


FOLDED = [
    case
    for case in json.loads((ROOT / "tests/oracles/rank_groups.json").read_text())["layouts"]
    if case["rank_offset"] == 0 and case["world_size"] <= 16 and (case["ep"] > 1 or case["etp_effective"] != case["tp"])
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FOLDED, ids=lambda case: str(case["id"]))
def test_groups_of_experts_equal_the_oracle(case):
    """With nobody at their other ends: a group's members are known to each rank alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = {name: case[name] for name in ("tp", "pp", "cp", "ep", "etp", "order")}
    mesh = Mesh.from_world_size(case["world_size"], **sizes)
    for rank in (0, mesh.world_size // 2 - 1, mesh.world_size - 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
        try:
            groups = Groups(mesh, rank, torch.device("cpu"), timedelta(seconds=HANG_SECONDS), backend="fake")
            opening.make(groups, opening.communicators(mesh, [], has_links=False)[1:])
            for axis, token in (("etp", "tp"), ("ep", "ep"), ("edp", "dp")):
                (expected,) = [line for line in case["expert"][token] if rank in line]
                assert members(groups.over(axis)) == (expected if len(expected) > 1 else [])
            alike = {axis: case["expert"][axis] == case["dense"][axis] for axis in ("tp", "dp")}
            assert (groups.over("etp") is groups.over("tp")) == (alike["tp"] or mesh.tp == mesh.etp == 1)
            assert (groups.over("edp") is groups.over("dp")) == (alike["dp"] or mesh.dp == mesh.edp == 1)
        finally:
            dist.destroy_process_group()


def test_one_rank_alone_has_no_group():
    groups = open_mesh({}, [(0, 1)])
    assert (groups.world, groups.by_name) == (None, {})
    assert not dist.is_initialized()
    groups.close()


def test_a_world_of_another_size_is_refused_before_any_group_is_made(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(PlanError, match=r"the plan is for 4 ranks \(tp 2 · dp 2\), but 3 were launched") as caught:
        open_mesh({"tp": 2, "dp": 2}, [])
    assert "launch 4 ranks" in caught.value.fix
    assert not dist.is_initialized()


def meet_with(values: list[str]) -> str:
    try:
        open_groups(
            Mesh(dp=3), {"the plan": "same", "torch": values[int(os.environ["RANK"])]}, [], timeout_seconds=HANG_SECONDS
        )
    except PlanError as error:
        return str(error) + f" initialized={dist.is_initialized()}"
    return ""


@pytest.mark.slow
def test_the_odd_rank_is_named_to_every_rank_and_the_group_is_ended():
    told = Ranks(3, "processes").run(meet_with, ["2.13", "2.11", "2.13"])
    assert len(set(told)) == 1
    assert told[0].startswith("torch differs between ranks: rank 1 of 3 (rank 1 has 2.11, most have 2.13)")
    assert told[0].endswith("initialized=False")


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
