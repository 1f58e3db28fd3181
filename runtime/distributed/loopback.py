"""A run on one host listens on the loopback alone, so that no other machine reaches its store or its ranks.

    the store        torch's own listens on every address, whatever host it is given: it takes a bound socket from here
    gloo, NCCL       listen on the interface that their variables name

Nothing changes for several hosts, or if the user has set an interface.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore

from passes.errors import PlanError
from planner.files.text import reason

HOST = "127.0.0.1"
_NAMES = ("localhost", HOST)
_INTERFACES = ("lo", "lo0")  # of Linux, of macOS and the BSDs
_SECONDS = 5.0  # for a connection to this host
_BACKLOG = 2048  # connections that wait to be accepted, as torch has it


def hosted_store(timeout: timedelta, port: int = 0, world_size: int | None = None) -> TCPStore:
    """A store on this host's loopback; port 0 is a free one. Waits for ``world_size`` ranks if that is given.

    Raises OSError if the port is taken.
    """
    listener = socket.create_server((HOST, port), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(
        HOST,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=world_size is not None,
        multi_tenant=world_size is not None,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def check_loopback() -> None:
    """Raise PlanError if nothing on this host can connect to the loopback: torch would try for the whole timeout."""
    try:
        with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname(), _SECONDS):
            pass
    except OSError as error:
        raise PlanError(
            f"ranks of one host reach each other over {HOST}, to which nothing can connect: {reason(error)}",
            where="the loopback interface of this host",
            fix="bring it up: `ip link set lo up`, `ip addr add 127.0.0.1/8 dev lo`",
        ) from error


def is_loopback(host: str) -> bool:
    return host in _NAMES


def interface_names(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which gloo and NCCL listen on the loopback; without those that ``environment`` has."""
    name = next((name for _, name in socket.if_nameindex() if name in _INTERFACES), None)
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    return {variable: value for variable, value in wanted.items() if variable not in environment}


def stay_on_one_host() -> None:
    """If the launcher places all ranks on this host, new groups listen only here."""
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is not None and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
        if is_loopback(os.environ.get("MASTER_ADDR", "")):
            check_loopback()
        os.environ.update(interface_names(os.environ))
