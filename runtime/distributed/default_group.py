"""The group over all ranks for tensors on their device, and the one for host memory and Python objects.

    default group    wanted    for the device    for the host
    none             gloo      it, made here     the same
    none             nccl      it, made here     gloo, made here
    gloo             gloo      it                the same
    gloo             nccl      nccl, made here   it
    nccl             nccl      it                gloo, made here
    gloo and nccl    nccl      it                gloo, made here
    gloo and nccl    gloo      gloo, made here   the same       on the CPU it is used unchanged
    nccl             gloo      an error on the CPU; gloo, made here, where ranks share a GPU

Two groups are used, never one with two backends: no tensor can then take the path for the other kind of memory.
"""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from passes.errors import PlanError
from runtime.distributed.faults.board import Board, Signer
from runtime.distributed.this_host import hosted_store, is_loopback

T = TypeVar("T")
BOARD = "MESHWRIGHT_BOARD"  # host:port of the store of ``launch``
BOARD_TIMEOUT = timedelta(seconds=10)
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
MOST_PORTS = 65535
_num_meetings = 0
_rendezvous_store: Store | None = None


@dataclass(frozen=True, slots=True)
class World:
    """The groups over all ranks. ``made``: those that were created here beside the default group."""

    device: ProcessGroup
    host: ProcessGroup
    owns_default: bool
    made: list[ProcessGroup]


def next_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a part of the ranks' store that no earlier rendezvous or group of this process has used.

    Keys of destroyed groups, and of attempts before a restart, stay in the launcher's store; the next group must not
    read their stale addresses.
    Raises PlanError if the environment names no store, or none answers.
    """
    global _num_meetings, _rendezvous_store
    _num_meetings += 1
    part = f"meshwright/{attempt()}/{_num_meetings}"
    if dist.is_initialized():
        return PrefixStore(part, dist.distributed_c10d._get_default_store())
    if _rendezvous_store is None:
        _rendezvous_store = _rendezvous(rank, world_size, timeout)
    return PrefixStore(part, _rendezvous_store)


def faults_board(*, of_any_session: bool = False) -> Board:
    """Return the board for messages outside all groups, on its own connection: a wait in a store blocks a connection.

    Call it after ``next_store``; its session is the number of that rendezvous.
    """
    signer, session = Signer.of(os.environ), None if of_any_session else _num_meetings
    if place := os.environ.get(BOARD):
        host, _, port = place.rpartition(":")
        return Board(TCPStore(host, int(port), None, False, BOARD_TIMEOUT), session, signer)
    base: Any = dist.distributed_c10d._get_default_store() if dist.is_initialized() else _rendezvous_store
    assert base is not None, "next_store comes first"
    store = base.clone()
    store.set_timeout(BOARD_TIMEOUT)
    return Board(PrefixStore(f"meshwright/faults/{attempt()}", store), session, signer)


def attempt() -> str:
    """Return the number of restarts of this job's ranks, as torchrun and ``launch`` count them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def default_backends() -> dict[str, str]:
    """Return device type → backend of the default group; empty if there is none."""
    if not dist.is_initialized():
        return {}
    pairs = dist.get_backend_config().split(",")
    return dict(pair.split(":", 1) for pair in pairs)


def open_world(device_type: str, backend: str, store: Store, rank: int, world_size: int, timeout: timedelta) -> World:
    """Return both groups. All ranks must call it. Raises PlanError for a default group that cannot be used."""
    if backend == "nccl" and not dist.is_nccl_available():
        raise PlanError("this torch is built without NCCL", where="device", fix="install a torch with CUDA and NCCL")
    backends = default_backends()
    owns_default = not backends
    if owns_default:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        backends = default_backends()
    default: Any = dist.group.WORLD
    made: list[ProcessGroup] = []
    device = default if can_carry(backends, device_type, backend) else _make(backend, timeout, made)
    host = device if backend == "gloo" else default if "nccl" not in backends.values() else _make("gloo", timeout, made)
    return World(device, host, owns_default, made)


def can_carry(backends: Mapping[str, str], device_type: str, backend: str) -> bool:
    """Return whether the default group serves the device; otherwise another must be created. Raises PlanError."""
    known = {of: name for of, name in backends.items() if of in ("cpu", "cuda")}
    if unknown := sorted(set(known.values()) - {"gloo", "nccl"}):
        raise _refused(f"uses {', '.join(unknown)}")
    if device_type == "cpu" and known.get("cpu") != "gloo":
        raise _refused("uses only NCCL, but this run computes on the CPU")
    return known.get(device_type) == backend


def _refused(what: str) -> PlanError:
    fix = 'let Engine create it, or initialize it with "gloo", "nccl" or "cpu:gloo,cuda:nccl"'
    return PlanError(f"the default process group {what}", where="torch.distributed.init_process_group", fix=fix)


def _make(backend: str, timeout: timedelta, made: list[ProcessGroup]) -> ProcessGroup:
    group: Any = dist.new_group(backend=backend, timeout=timeout)
    made.append(group)
    return group


def _rendezvous(rank: int, world_size: int, timeout: timedelta) -> Store:
    absent = [name for name in _ADDRESS if not os.environ.get(name)]
    if absent:
        raise PlanError(
            f"{world_size} ranks were launched, but the environment has no rendezvous: {' and '.join(absent)} not set",
            where=absent[0],
            fix="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, the same on every rank; "
            "torchrun sets both",
        )
    port = os.environ["MASTER_PORT"]
    if not port.isdecimal() or int(port) > MOST_PORTS:
        fix = f"set it to a free port of the host of rank 0, from 0 to {MOST_PORTS}"
        raise PlanError(f"MASTER_PORT is {port[:40]!r}, which is no port", where="MASTER_PORT", fix=fix)
    try:
        if rank == 0 and (store := _hosted_here(world_size, timeout)):
            return store
        joining = dist.rendezvous("env://", rank, world_size, timeout=timeout)
        store, _, _ = within(timeout.total_seconds() + 1.0, partial(next, joining))
    except (RuntimeError, ValueError, TimeoutError) as error:
        address = ":".join(os.environ[name] for name in _ADDRESS)
        what = f"rank {rank} found no other ranks at {address} within {timeout.total_seconds():g} s"
        fix = f"check that rank 0 runs there and that every rank was started ({str(error).splitlines()[0]})"
        raise PlanError(what, where="MASTER_ADDR", fix=fix) from error
    return store


def within(seconds: float, make: Callable[[], T]) -> T:
    """Return ``make()``, run in a thread: torch has no timeout for a server that accepts a connection but is silent.

    Raises its error, or TimeoutError, after which the thread is left running.
    """
    result = in_thread(make, "meshwright-connect", outlives=False)
    if not wait([result], seconds).done:
        raise TimeoutError("a server there accepts connections and does not answer")
    return result.result()


def in_thread(make: Callable[[], T], name: str, *, outlives: bool) -> Future[T]:
    """Run ``make()`` in its own thread. ``outlives``: the interpreter waits for it at exit."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(make())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=not outlives).start()
    return result


def hosts_store() -> bool:
    """Return whether rank 0 hosts the store, rather than ``launch`` or torchrun."""
    return not os.environ.get(BOARD) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _hosted_here(world_size: int, timeout: timedelta) -> Store | None:
    """Return a store on the loopback if rank 0 hosts it and all ranks are on its host; None: torch creates it."""
    if not hosts_store() or not is_loopback(os.environ["MASTER_ADDR"]):
        return None
    try:
        return hosted_store(timeout, int(os.environ["MASTER_PORT"]), world_size)
    except OSError:  # the port is taken, perhaps by a store of this process, which torch shares
        return None
