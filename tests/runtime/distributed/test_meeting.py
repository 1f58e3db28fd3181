"""The meeting before any group: one verdict, or one error on every rank that names the ranks."""

import os
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from passes.errors import PlanError
from planner.mesh import Mesh
from runtime.distributed import opening
from runtime.distributed.default_group import _rendezvous
from runtime.distributed.meeting import Rendezvous, Seat, Verdict, judge
from runtime.distributed.opening import open_groups
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks


def gpus(*names: str, named: bool = False) -> list[Seat]:
    """A rank for each GPU name, all on one host."""
    return [Seat("node1", f"cuda:{index}", gpu, named) for index, gpu in enumerate(names)]


CPU = Seat("node7", "cpu")
MOMENT = 1.0  # seconds, for a server that never answers


def test_gpus_talk_over_nccl_and_cpus_over_gloo():
    assert judge(gpus("a", "b"), pp=2) == Verdict("nccl")
    assert judge([CPU, CPU], pp=2) == Verdict("gloo")


def test_tied_stages_are_those_of_all_ranks_in_one_order():
    seats = [Seat(tied=((0, 3),)), Seat(tied=((1, 2), (0, 3))), Seat()]
    assert judge(seats, pp=4).tied == ((0, 3), (1, 2))


REFUSED = {
    "a node without GPUs": (
        [*gpus("a", "b", "c"), CPU],
        1,
        r"rank 3 of 4 would run on cpu \(host node7\), the others on cuda:0",
    ),
    "one node with GPUs": (
        [CPU, *gpus("a"), CPU],
        1,
        r"rank 1 of 3 would run on cuda:0 \(host node1\), the others on cpu",
    ),
    "one GPU shown to two": (
        gpus("a", "b", "a"),
        1,
        r"ranks 0, 2 are on one GPU \(cuda:0 of host node1\): there are more",
    ),
    "one GPU, named by one": (
        [*gpus("a", named=True), *gpus("a")],
        1,
        "ranks 0, 1 are on one GPU .*: there are more ranks than GPUs",
    ),
    "one GPU, named, with stages": (
        gpus("a", "a", named=True),
        2,
        "over gloo, which cannot send activations between pipeline stages",
    ),
    "another torch": (
        [Seat(identity={"torch": v}) for v in ("2.13", "2.11", "2.13")],
        1,
        r"torch differs between ranks: rank 1 of 3 \(rank 1 has 2.11, most have 2.13\)",
    ),
    "a rank without a device": (
        [CPU, Seat(error=("it is not known which", "LOCAL_RANK", "set it")), CPU],
        1,
        "rank 1: it is not known which",
    ),
    "no rank has a device": ([Seat(error=("it is not known which", "", ""))] * 2, 1, "^it is not known which$"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("seats", "pp", "told"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_together_is_refused_with_the_ranks(seats, pp, told):
    with pytest.raises(PlanError, match=told):
        judge(seats, pp)


def test_ranks_that_were_given_one_gpu_by_name_talk_over_gloo():
    assert judge(gpus("a", "a", named=True), pp=1) == Verdict("gloo")
    assert judge(gpus("a", "a", "b", named=True), pp=1) == Verdict("gloo")


@pytest.mark.parametrize(
    ("hosts", "backend"),
    [((None, None), "gloo"), (("one", "one"), "gloo"), (("one", "two"), "nccl"), ((None, "one"), "nccl")],
)
def test_ranks_of_one_gpu_talk_over_nccl_if_each_has_a_host_id_of_its_own(
    hosts: tuple[str | None, ...], backend: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-7"))
    names = []
    for host in hosts:
        monkeypatch.delenv("NCCL_HOSTID", raising=False)
        if host is not None:
            monkeypatch.setenv("NCCL_HOSTID", host)
        names.append(opening._gpu(torch.device("cuda:0"), "node1"))
    assert judge(gpus(*names, named=True), pp=1) == Verdict(backend)


def meet_all(seats: list[Seat], come: list[int], seconds: float) -> dict[int, Verdict | str]:
    """What each rank that comes hears, each on its own thread."""
    store, heard = HashStore(), {}

    def one(rank: int) -> None:
        try:
            heard[rank] = Rendezvous(store, rank, len(seats), timedelta(seconds=seconds)).meet(seats[rank])
        except PlanError as error:
            heard[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in come]
    for rank, thread in zip(come, threads, strict=True):
        thread.start()
        if rank:  # rank 0 looks for a moment alone
            store.wait([f"seat/{rank}"], timedelta(seconds=HANG_SECONDS))
    for thread in threads:
        thread.join(HANG_SECONDS)
    return heard


def test_every_rank_hears_the_same_verdict():
    seats = [Seat(tied=((0, 1),), identity={"plan": "x"})] * 5
    assert meet_all(seats, [4, 2, 0, 1, 3], HANG_SECONDS) == dict.fromkeys(range(5), Verdict("gloo", ((0, 1),)))


def test_every_rank_hears_the_same_error():
    heard = meet_all([*gpus("a", "b"), CPU], [0, 1, 2], HANG_SECONDS)
    assert set(heard) == {0, 1, 2}
    assert len(set(heard.values())) == 1
    assert str(heard[2]).startswith("rank 2 of 3 would run on cpu (host node7), the others on cuda:0")


def test_rank_0_which_may_host_the_store_ends_after_the_others_have_heard_an_error():
    store = HashStore()
    seats, order = [*gpus("a"), CPU], []

    def one(rank: int) -> None:
        with pytest.raises(PlanError):
            Rendezvous(store, rank, 2, timedelta(seconds=HANG_SECONDS)).meet(seats[rank])
        order.append((rank, store.check(["heard/1"])))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert (0, True) in order


SHORT_SECONDS = 0.2


def test_those_who_did_not_come_are_named_to_those_who_did():
    heard = meet_all([CPU] * 4, [2, 0], SHORT_SECONDS)
    assert set(heard) == {0, 2}
    assert len(set(heard.values())) == 1
    assert str(heard[0]).startswith("ranks 1, 3 of 4 did not join within 0.2 s")


def open_with_a_gpu_on_rank_1() -> str:
    """Rank 1 finds a GPU where rank 0 finds none: the driver's answers are pretended, all else is real."""
    if os.environ["RANK"] == "1":
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 2
        torch.cuda.get_device_properties = lambda device: None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        open_groups(Mesh(dp=2), {}, [], timeout_seconds=HANG_SECONDS)
    except PlanError as error:
        return f"{error.what} initialized={dist.is_initialized()}"
    return ""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_node_without_gpus_is_one_error_and_no_group_is_made():
    told = Ranks(2, "processes").run(open_with_a_gpu_on_rank_1)
    assert told[0] == told[1]
    assert "would run on" in told[0]
    assert told[0].endswith("initialized=False")


LAUNCHERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def open_under(launcher: str) -> int:
    """With the variables of another launcher in the place of torchrun's."""
    rank, size, local = LAUNCHERS[launcher]
    for name, other in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", local)):
        os.environ[other] = os.environ.pop(name)
    del os.environ["LOCAL_WORLD_SIZE"]
    groups = open_groups(Mesh(dp=2), {}, [], timeout_seconds=HANG_SECONDS)
    total = torch.tensor([groups.rank + 1])
    dist.all_reduce(total, group=groups.over("dp"))
    groups.close()
    return int(total)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_another_launcher_find_each_other(launcher):
    assert Ranks(2, "processes").run(open_under, launcher) == [3, 3]


def test_ranks_without_a_place_to_meet_are_told_what_to_set(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(PlanError, match="has no rendezvous: MASTER_ADDR and MASTER_PORT not set") as caught:
        open_groups(Mesh(dp=2), {}, [], timeout_seconds=HANG_SECONDS)
    assert "set MASTER_ADDR to the host of rank 0" in caught.value.fix


@pytest.mark.parametrize("port", ["abc", "-3", "99999999"])
def test_a_port_that_is_none_is_named(port: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    for rank in (0, 1):
        with pytest.raises(PlanError, match=f"MASTER_PORT is '{port}', which is no port"):
            _rendezvous(rank, 2, timedelta(seconds=MOMENT))


@pytest.mark.thorough
def test_a_server_that_accepts_and_never_answers_is_refused_when_time_is_up(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PlanError, match=f"rank 1 found no other ranks at 127.0.0.1:{port} within 1 s") as caught:
            _rendezvous(1, 2, timedelta(seconds=MOMENT))
    assert "a server there accepts connections and does not answer" in caught.value.fix
