"""Ranks agree: an error on some ranks is raised on all ranks, so that no rank waits forever.

Values go from rank to rank as JSON in tensors of bytes: received content can be wrong, but it never runs. torch's own
exchanges of objects pickle, and whoever reaches the port of a group or its store could then run code here.
``read`` makes of one rank's JSON the value that is meant; ``of_kind`` reads dataclasses and named tuples.

Where rank 0 works long, writing files, the others wait for a word of it without locks, as long as it takes, and then
go on in the group's own time. They notice a dead peer at once: the connection closes.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python
from torch import Tensor

from passes.errors import PlanError, RunError
from runtime.distributed.groups import Groups

T = TypeVar("T")
MOST_BYTES = 1 << 30  # of one rank in one exchange
_WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
PATIENCE = timedelta(days=1)
_adapter = cache(TypeAdapter)


def of_kind(kind: Any) -> Callable[[Any], Any]:
    """A ``read`` of a dataclass, a named tuple, or a tuple of such. Raises ValueError for what is none."""

    def read(given: Any) -> Any:
        names = {field.name for field in fields(kind)} if is_dataclass(kind) else None
        if isinstance(given, dict) and given.keys() != names:
            raise ValueError(f"no {kind}")
        return _adapter(kind).validate_python(given)

    return read


def all_gather_json(groups: Groups, own: Any, read: Callable[[Any], T] = lambda value: value) -> list[T]:
    """Every rank's ``own``, in their order, on every rank."""
    return _gathered(groups, own, read, None)


def gather_json(groups: Groups, own: Any, read: Callable[[Any], T] = lambda value: value) -> list[T]:
    """Every rank's ``own``, in their order, on rank 0; empty elsewhere."""
    return _gathered(groups, own, read, 0)


def unlike_rank_0(groups: Groups, own: Any) -> list[int]:
    """Return the ranks with another ``own`` than rank 0, on every rank."""
    values = all_gather_json(groups, own)
    return [rank for rank, value in enumerate(values) if value != values[0]]


def _gathered(groups: Groups, own: Any, read: Callable[[Any], T], to: int | None) -> list[T]:
    """``to``: the rank that gets all; None: every rank."""
    if groups.host is None:
        return [read(own)]
    content = _content_of(own)
    given = [torch.empty(1, dtype=torch.int64) for _ in range(groups.mesh.world_size)]
    dist.all_gather(given, torch.tensor([len(content)]), group=groups.host)
    sizes = [int(size) for size in given]
    _require_small(sizes)
    padded = torch.nn.functional.pad(content, (0, max(sizes) - len(content)))
    found = [torch.empty_like(padded) for _ in sizes] if to in (None, groups.rank) else []
    if to is None:
        dist.all_gather(found, padded, group=groups.host)
    else:
        dist.gather(padded, found or None, dst=to, group=groups.host)
    return [_read(rank, content[: sizes[rank]], read) for rank, content in enumerate(found)]


def broadcast_json(groups: Groups, value: Any, read: Callable[[Any], T] = lambda value: value) -> T:
    """Rank 0's ``value``, on every rank."""
    if groups.host is None:
        return read(value)
    content = _content_of(value) if groups.rank == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([content.numel()])
    dist.broadcast(size, 0, group=groups.host)
    _require_small([int(size)])
    if groups.rank != 0:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, 0, group=groups.host)
    return _read(0, content, read)


def _content_of(value: Any) -> Tensor:
    text = json.dumps(value, separators=(",", ":"), default=to_jsonable_python)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _require_small(sizes: list[int]) -> None:
    """The same error on all ranks, before memory is taken for anything."""
    for rank, size in enumerate(sizes):
        if not 0 < size <= MOST_BYTES:
            raise PlanError(
                f"rank {rank} has {size} bytes for one exchange between ranks; from 1 to {MOST_BYTES} can be sent",
                fix="profile fewer steps, if this is a profile; otherwise this is a bug in meshwright",
            )


def _read(rank: int, content: Tensor, read: Callable[[Any], T]) -> T:
    try:
        return read(json.loads(content.numpy().tobytes()))
    except _WRONG as error:
        raise RunError(f"rank {rank} sent a value of another exchange ({type(error).__name__})") from error


@contextmanager
def agreed(groups: Groups, *, rank_0_is_long: bool = False) -> Iterator[None]:
    """All ranks enter and leave together; a PlanError or OSError of any rank inside is raised on all of them.

    The error is that of the lowest rank that has one. Inside there must be no exchange between ranks, unless each rank
    takes part in it whatever went wrong. ``rank_0_is_long``: the others may wait for it beyond the group's timeout.
    """
    found: PlanError | None = None
    try:
        yield
    except PlanError as error:
        found = error
    except OSError as error:
        found = PlanError(
            f"{error.strerror or error}",
            where=str(error.filename or ""),
            fix="use files that this user may read and write",
        )
        found.__cause__ = error
    if rank_0_is_long:
        until_rank_0_is_done(groups)
    agree(groups, found)


@contextmanager
def halfway(groups: Groups, state: str) -> Iterator[None]:
    """``agreed`` around what changes a state: a file may differ since it was checked, or a disk fail."""
    with agreed(groups):
        try:
            yield
        except (PlanError, OSError) as failed:
            what = failed.what if isinstance(failed, PlanError) else str(failed)
            what = f"loading failed halfway, and {state} incomplete: {what}"
            raise PlanError(what, fix="load it again") from failed


def agree(groups: Groups, error: PlanError | None) -> None:
    """Exchange errors and raise the first one on every rank."""
    errors = all_gather_json(groups, error and error.words, lambda words: words and PlanError.of_words(words))
    for rank, found in enumerate(errors):
        if found is None:
            continue
        if error is not None and str(error) == str(found):
            raise error
        is_named = found.what.startswith(whose := f"rank {rank}: ") or all(str(e) == str(found) for e in errors)
        others = "" if is_named else whose
        raise PlanError(f"{others}{found.what}", where=found.where, fix=found.fix)


def call(groups: Groups, ranks: Iterable[int]) -> None:
    """On rank 0: end one ``wait_for_rank_0`` of each of ``ranks``."""
    word = torch.zeros(1, dtype=torch.uint8)
    for work in [dist.isend(word, rank, group=groups.host) for rank in ranks]:
        assert work is not None
        work.wait()


def wait_for_rank_0(groups: Groups) -> None:
    """On another rank: until rank 0 calls."""
    work = dist.irecv(torch.empty(1, dtype=torch.uint8), 0, group=groups.host)
    assert work is not None
    work.wait(PATIENCE)


def until_rank_0_is_done(groups: Groups) -> None:
    """On every rank, before an exchange of all, after rank 0 may have been long."""
    if groups.host is None:
        return
    if groups.rank == 0:
        call(groups, range(1, groups.mesh.world_size))
    else:
        wait_for_rank_0(groups)
