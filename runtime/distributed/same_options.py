"""Compares the options of a command between the ranks of a launcher, before anything takes long; later its data.

An option that only some ranks have changes the order of collectives: all ranks would wait for each other until the
timeout. Ranks of ``launch`` get their options from one process.
"""

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any

from passes.errors import PlanError
from planner.files.named_code import is_named
from planner.spec.spec import Spec
from runtime.distributed.agreement import all_gather_json
from runtime.distributed.default_group import faults_board, hosts_store, next_store
from runtime.distributed.devices import known_rank, launched
from runtime.distributed.faults.board import Board, Signer
from runtime.distributed.faults.failure import Failure
from runtime.distributed.faults.faults import is_published, publish, withdraw
from runtime.distributed.groups import Groups
from runtime.distributed.meeting import HEARD, LATE, Rendezvous, Seat, require_equal
from runtime.distributed.opening import check_world
from runtime.distributed.this_host import stay_on_one_host

_PREFIXES = ("num_", "is_")


def require_same_options(
    options: Any,
    *,
    own: Collection[str] = (),
    places: Collection[str] = (),
    timeout_seconds: float = 600.0,
    check: Callable[[], object] | None = None,
) -> None:
    """Raise PlanError on every rank if ``options``, a dataclass, differ between ranks. All ranks must call it.

    If they have a field ``spec``, a file, its keys are compared. ``own``: names of fields that may differ. ``places``:
    names of fields with paths, which may differ between hosts: ranks only compare whether one is given.
    ``check``: checks this rank's own options; its PlanError is raised on every rank.
    """
    withdraw()
    place = launched(os.environ)
    rank, error, keys, mesh = known_rank(place), None, {}, None
    try:
        if check is not None:
            check()
        if (file := getattr(options, "spec", None)) is not None:
            spec = Spec.load(file)
            keys, mesh = keys_of(spec), None if spec.mesh.has_auto else spec.mesh.to_mesh()
    except PlanError as refusal:
        if place.world_size == 1:
            raise
        error = refusal.words
    if mesh is not None:
        check_world(mesh, place.world_size)  # before the rendezvous, which would wait for ranks that were not launched
    if place.world_size == 1:
        return
    texts = {
        _named(field.name): str(value) if field.name not in places else "none" if value is None else "one"
        for field in fields(options)
        for value in [getattr(options, field.name)]
        if field.name not in own
    } | keys
    seat = Seat(socket.gethostname(), identity={"WORLD_SIZE": str(place.world_size), **texts}, error=error)
    stay_on_one_host()
    timeout = timedelta(seconds=timeout_seconds)
    store = next_store(rank, place.world_size, timeout)
    Rendezvous(store, rank, place.world_size, timeout, Signer.of(os.environ)).meet(seat)


@contextmanager
def told_to_all() -> Iterator[None]:
    """Publish an error of this rank before it has groups, for other ranks that wait for it at the rendezvous."""
    try:
        yield
    except BaseException as error:
        place = launched(os.environ)
        if place.world_size > 1 and not is_published():
            with suppress(Exception):  # no store: no rank waits in it
                _leave(faults_board(of_any_session=True), known_rank(place), place.world_size, error)
        raise


def _leave(board: Board, rank: int, world_size: int, error: BaseException) -> None:
    """Publish ``error``. If rank 0 hosts the store, it waits a while for the others to read it, or to fail too."""
    publish(board, Failure.of(rank, f"rank {rank}", error))
    if rank:
        board.store.add(HEARD, 1)
    end = time.monotonic() + LATE.total_seconds()
    while rank == 0 and hosts_store() and board.store.add(HEARD, 0) < world_size - 1 and time.monotonic() < end:
        time.sleep(0.05)


def require_same(name: str, value: str, groups: Groups) -> None:
    """Raise PlanError on every rank, naming the ranks with another ``value``. All ranks must call it."""
    values = all_gather_json(groups, value, str)
    require_equal(name, dict(enumerate(values)), len(values))


def _named(field: str) -> str:
    """Return the name of the option on the command line."""
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    return f"--{field.replace('_', '-')}"


def keys_of(spec: Spec) -> dict[str, str]:
    """Return key → value of ``spec`` without defaults; of files only names, since paths may differ between hosts."""
    return dict(_keys_in(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)))


def _keys_in(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        at = f"{path}.{name}".lstrip(".")
        if isinstance(value, Mapping):
            yield from _keys_in(value, at)
        elif at != "cluster":
            yield f"{at} of the spec", str(value).rpartition("/")[2] if is_named(value) else str(value)
