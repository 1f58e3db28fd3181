"""A run on one host listens on its loopback alone."""

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from planner.mesh import Mesh
from runtime.distributed.opening import open_groups
from runtime.distributed.this_host import HOST, hosted_store, interface_names, stay_on_one_host
from runtime.fuzz.forks import in_forks
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

LISTENS = "0A"
LOOPBACKS = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net/tcp")


def listening() -> set[str]:
    """The addresses, as the kernel writes them, on which sockets of this process listen."""
    own = set[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except FileNotFoundError:  # that of the directory itself
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


def listening_in_a_run() -> set[str]:
    """While all groups of a mesh are open."""
    groups = open_groups(Mesh(tp=2), {}, [], device="cpu", timeout_seconds=HANG_SECONDS)
    groups.barrier()
    found = listening()
    groups.barrier()
    groups.close()
    return found


def without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")  # so that it is taken away again, whoever sets it in between
        monkeypatch.delenv(variable)


@pytest.mark.slow
def test_launched_ranks_listen_on_the_loopback_alone(monkeypatch):
    without_names(monkeypatch)
    found = Ranks(2, "processes").run(listening_in_a_run)
    assert all(found), "gloo listens"
    assert set().union(*found) <= LOOPBACKS


def test_the_launchers_store_listens_on_the_loopback_alone():
    store, before = hosted_store(timedelta(seconds=HANG_SECONDS)), listening()
    TCPStore(HOST, store.port, None, False, timedelta(seconds=HANG_SECONDS)).set("key", "value")
    assert store.get("key") == b"value"
    assert before <= LOOPBACKS
    assert "0100007F" in before


def run_of_rank(rank: int, port: int) -> set[str]:
    """Started by hand: rank 0 hosts the store."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return listening_in_a_run()


@pytest.mark.slow
def test_ranks_that_were_started_by_hand_listen_on_the_loopback_alone(monkeypatch):
    without_names(monkeypatch)
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    found = in_forks([(run_of_rank, (rank, port)) for rank in range(2)], 60)
    assert all(found), "gloo listens"
    assert set().union(*found) <= LOOPBACKS


def test_interfaces_that_the_user_names_stay():
    assert interface_names({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}) == {}
    assert interface_names({"GLOO_SOCKET_IFNAME": "eth0"}) == {"NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize(("local", "named"), [("4", True), ("2", False)])
def test_ranks_of_several_hosts_listen_where_torch_has_it(monkeypatch, local, named):
    without_names(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    stay_on_one_host()
    assert ("GLOO_SOCKET_IFNAME" in os.environ) is named
