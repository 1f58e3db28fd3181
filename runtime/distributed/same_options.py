"""Options of a command, compared between the ranks of a launcher before anything takes long; then its data.

An option that only some ranks have changes the order of exchanges: all ranks would wait for each other until time is
up. Ranks of ``launch`` get their options from one process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from dataclasses import fields
from datetime import timedelta
from typing import Any

from passes.errors import PlanError
from runtime.distributed.default_group import next_store
from runtime.distributed.devices import known_rank, launched
from runtime.distributed.exchange_json import all_gather_json
from runtime.distributed.groups import Groups
from runtime.distributed.loopback import stay_on_one_host
from runtime.distributed.meeting import Seat, meet, require_equal
from runtime.distributed.signatures import Signer

_PREFIXES = ("num_", "is_")


def require_same_options(
    options: Any,
    *,
    own: Collection[str] = (),
    places: Collection[str] = (),
    timeout_seconds: float = 600.0,
    check: Callable[[], object] | None = None,
) -> None:
    """The same call on every rank. ``options``: a dataclass. ``own``: its fields that concern one rank alone.

    ``places``: files and directories, which hosts may name in different ways: ranks compare whether one is given.
    ``check``: of this rank's own options. Raises its PlanError, or that of options that differ, on every rank.
    """
    place = launched(os.environ)
    rank, error = known_rank(place), None
    try:
        if check is not None:
            check()
    except PlanError as found:
        if place.world_size == 1:
            raise
        error = (found.what, str(found.where or ""), found.fix)
    if place.world_size == 1:
        return
    texts = {
        _named(field.name): _text(getattr(options, field.name), is_place=field.name in places)
        for field in fields(options)
        if field.name not in own
    }
    seat = Seat(socket.gethostname(), identity={"WORLD_SIZE": str(place.world_size), **texts}, error=error)
    stay_on_one_host()
    timeout = timedelta(seconds=timeout_seconds)
    store = next_store(rank, place.world_size, timeout)
    meet(store, seat, rank, place.world_size, 1, timeout, Signer.of(os.environ))


def require_same_data(identity: str, groups: Groups) -> None:
    """The same call on every rank: each reads rows that no other reads, so nothing later would show another text.

    Raises PlanError on every rank, naming the ranks with another text.
    """
    found = all_gather_json(groups, identity, str)
    require_equal("the data (by content)", dict(enumerate(found)), len(found))


def _named(field: str) -> str:
    """As the command line names the option."""
    for prefix in _PREFIXES:
        field = field.removeprefix(prefix)
    return f"--{field.replace('_', '-')}"


def _text(value: Any, *, is_place: bool) -> str:
    return str(value) if not is_place else "none" if value is None else "one"
