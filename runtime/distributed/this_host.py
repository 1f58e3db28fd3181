"""Checks this host for a launch: length of socket paths, limit of open files, loopback; with one error for each.

A run on one host listens only on the loopback, so that no other machine can reach its store or its ranks.

    the store        torch's own listens on every address, for any host name: it gets a bound socket from here
    gloo, NCCL       listen on the interface in their variables

Nothing changes for several hosts, or if the user has set an interface.
"""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing import util

from torch.distributed import TCPStore

from passes.errors import PlanError
from planner.files.text import OPEN_FILES_FIX, reason

MOST_BYTES = 80  # of a socket's directory: sockaddr_un has 104 to 108 for directory and name
_FEWEST_FILES, _FILES = 64, 1024  # open files: two ranks and their launcher need up to 40 each; more ranks need more
HOST = "127.0.0.1"
_NAMES = ("localhost", HOST)
_INTERFACES = ("lo", "lo0")  # Linux; macOS and the BSDs
_SECONDS = 5.0  # for a connection to this host
_BACKLOG = 2048  # connections that wait to be accepted, as torch has it


def check_host() -> None:
    """Raise PlanError for a shortage that would end ranks later, or let them wait."""
    check_directory()
    _check_open_files()
    check_loopback()


def check_directory() -> None:
    """Raise PlanError if a socket in the directory for temporary files would have too long a name."""
    length = len(os.fsencode(util.get_temp_dir()))
    if length > MOST_BYTES:
        raise PlanError(
            f"the directory for temporary files has a path of {length} bytes, and a socket in it takes at most "
            f"{MOST_BYTES}",
            where="TMPDIR",
            fix="set TMPDIR to a directory with a short path, such as /tmp",
        )


def _check_open_files() -> None:
    """Raise the soft limit of open files, up to the hard limit; raise PlanError if that is too low."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        soft = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < _FEWEST_FILES:
            what = f"a process may have {soft} files open, and ranks need {_FEWEST_FILES} or more"
            raise PlanError(what, where="the limit of open files", fix=OPEN_FILES_FIX)


def hosted_store(timeout: timedelta, port: int = 0, world_size: int | None = None) -> TCPStore:
    """Return a store on this host's loopback; port 0: any free port. Waits for ``world_size`` ranks, if given.

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
    """Raise PlanError if no connection to the loopback is possible: torch would retry for the whole timeout."""
    try:
        with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname(), _SECONDS):
            pass
    except OSError as error:
        what = f"ranks of one host reach each other over {HOST}, to which nothing can connect: {reason(error)}"
        fix = "bring it up: `ip link set lo up`, `ip addr add 127.0.0.1/8 dev lo`"
        raise PlanError(what, where="the loopback interface of this host", fix=fix) from error


def is_loopback(host: str) -> bool:
    return host in _NAMES


def interface_names(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make gloo and NCCL listen on the loopback, without those in ``environment``."""
    name = next((name for _, name in socket.if_nameindex() if name in _INTERFACES), None)
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"} if name else {}
    return {variable: value for variable, value in wanted.items() if variable not in environment}


def stay_on_one_host() -> None:
    """Make new groups listen only on the loopback, if the launcher places all ranks on this host."""
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is not None and os.environ.get("LOCAL_WORLD_SIZE") == world_size:
        if is_loopback(os.environ.get("MASTER_ADDR", "")):
            check_loopback()
        os.environ.update(interface_names(os.environ))
