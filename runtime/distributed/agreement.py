"""Agreement of ranks: an error on some ranks is raised on all ranks, so that no rank waits forever.

Ranks exchange values as JSON in tensors of bytes: received content can be wrong, but it is never executed. torch's own
exchanges of objects pickle: a process that reaches the port of a group or its store could then run code here.
``read`` converts one rank's JSON to a value; ``of_kind`` reads dataclasses and named tuples.

While rank 0 writes files, the others wait for a message from it without a time limit, and then continue with the
group's own timeout. They notice a dead peer at once, because its connection closes.
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
    """Return a ``read`` for a dataclass, a named tuple, or a tuple of these. It raises ValueError for other values."""

    def read(value: Any) -> Any:
        names = {field.name for field in fields(kind)} if is_dataclass(kind) else None
        if isinstance(value, dict) and value.keys() != names:
            raise ValueError(f"no {kind}")
        return _adapter(kind).validate_python(value)

    return read


def gather_json(groups: Groups, own: Any, read: Callable[[Any], T] = lambda value: value) -> list[T]:
    """Return each rank's ``own``, by rank, on rank 0; an empty list elsewhere."""
    return all_gather_json(groups, own, read, to=0)


def unlike_rank_0(groups: Groups, own: Any) -> list[int]:
    """Return the ranks with another ``own`` than rank 0, on every rank."""
    values = all_gather_json(groups, own)
    return [rank for rank, value in enumerate(values) if value != values[0]]


def all_gather_json(
    groups: Groups, own: Any, read: Callable[[Any], T] = lambda value: value, *, to: int | None = None
) -> list[T]:
    """Return each rank's ``own``, by rank, on every rank; with ``to`` on that rank alone, an empty list elsewhere."""
    if groups.host is None:
        return [read(own)]
    content = _content_of(own)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(groups.mesh.world_size)]
    dist.all_gather(lengths, torch.tensor([len(content)]), group=groups.host)
    sizes = [int(size) for size in lengths]
    _require_small(sizes)
    padded = torch.nn.functional.pad(content, (0, max(sizes) - len(content)))
    contents = [torch.empty_like(padded) for _ in sizes] if to in (None, groups.rank) else []
    if to is None:
        dist.all_gather(contents, padded, group=groups.host)
    else:
        dist.gather(padded, contents or None, dst=to, group=groups.host)
    return [_read(rank, content[: sizes[rank]], read) for rank, content in enumerate(contents)]


def broadcast_json(groups: Groups, value: Any, read: Callable[[Any], T] = lambda value: value) -> T:
    """Return rank 0's ``value`` on every rank."""
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
    """Raise the same PlanError on all ranks, before memory is allocated, if a size is out of range."""
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
    """Run a block that all ranks leave together; a PlanError or OSError of any rank inside is raised on all of them.

    The error is that of the lowest rank that has one. Ranks must not communicate inside, unless each rank takes part
    even after an error. ``rank_0_is_long``: the others wait for rank 0 beyond the group's timeout.
    """
    refusal: PlanError | None = None
    try:
        yield
    except PlanError as error:
        refusal = error
    except OSError as error:
        refusal = PlanError(
            f"{error.strerror or error}",
            where=str(error.filename or ""),
            fix="use files that this user may read and write",
        )
        refusal.__cause__ = error
    if rank_0_is_long:
        until_rank_0_is_done(groups)
    agree(groups, refusal)


@contextmanager
def halfway(groups: Groups, state: str) -> Iterator[None]:
    """Run a block as ``agreed`` does, in which ``state`` changes: a file may have changed since it was checked."""
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
    for rank, first in enumerate(errors):
        if first is None:
            continue
        if error is not None and str(error) == str(first):
            raise error
        is_named = first.what.startswith(name := f"rank {rank}: ") or all(str(e) == str(first) for e in errors)
        raise PlanError(f"{'' if is_named else name}{first.what}", where=first.where, fix=first.fix)


def call(groups: Groups, ranks: Iterable[int]) -> None:
    """End one ``wait_for_rank_0`` of each of ``ranks``; called on rank 0."""
    word = torch.zeros(1, dtype=torch.uint8)
    for work in [dist.isend(word, rank, group=groups.host) for rank in ranks]:
        assert work is not None
        work.wait()


def wait_for_rank_0(groups: Groups) -> None:
    """Wait until rank 0 calls ``call`` for this rank; called on other ranks."""
    work = dist.irecv(torch.empty(1, dtype=torch.uint8), 0, group=groups.host)
    assert work is not None
    work.wait(PATIENCE)


def until_rank_0_is_done(groups: Groups) -> None:
    """Wait for rank 0 without a time limit; called on every rank, before an exchange of all."""
    if groups.host is None:
        return
    if groups.rank == 0:
        call(groups, range(1, groups.mesh.world_size))
    else:
        wait_for_rank_0(groups)
