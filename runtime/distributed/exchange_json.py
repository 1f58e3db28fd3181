"""Values from rank to rank as JSON in tensors of bytes: received content can be wrong, but it never runs.

    sizes       every rank learns how many bytes each has, and all refuse the same ones
    bytes       padded to the largest

torch's own exchanges of objects pickle, and whoever reaches the port of a group or its store could then run code here.
``read`` makes of one rank's JSON the value that is meant.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from passes.errors import PlanError, RunError
from runtime.distributed.groups import Groups

T = TypeVar("T")
MOST_BYTES = 1 << 30  # of one rank in one exchange
_WRONG = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def _as_it_is(value: Any) -> Any:
    return value


def all_gather_json(groups: Groups, own: Any, read: Callable[[Any], T] = _as_it_is) -> list[T]:
    """Every rank's ``own``, in their order, on every rank."""
    if groups.host is None:
        return [read(own)]
    content = _content_of(own)
    sizes = _sizes(groups, len(content))
    padded = _padded(content, sizes)
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=groups.host)
    return _all_read(found, sizes, read)


def gather_json(groups: Groups, own: Any, read: Callable[[Any], T] = _as_it_is) -> list[T]:
    """Every rank's ``own``, in their order, on rank 0; empty elsewhere."""
    if groups.host is None:
        return [read(own)]
    content = _content_of(own)
    sizes = _sizes(groups, len(content))
    padded = _padded(content, sizes)
    found = [torch.empty_like(padded) for _ in sizes] if groups.rank == 0 else None
    dist.gather(padded, found, dst=0, group=groups.host)
    return _all_read(found, sizes, read) if found is not None else []


def broadcast_json(groups: Groups, value: Any, read: Callable[[Any], T] = _as_it_is) -> T:
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
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def _sizes(groups: Groups, own: int) -> list[int]:
    found = [torch.empty(1, dtype=torch.int64) for _ in range(groups.mesh.world_size)]
    dist.all_gather(found, torch.tensor([own]), group=groups.host)
    sizes = [int(size) for size in found]
    _require_small(sizes)
    return sizes


def _require_small(sizes: list[int]) -> None:
    """The same error on all ranks, before memory is taken for anything."""
    for rank, size in enumerate(sizes):
        if not 0 < size <= MOST_BYTES:
            raise PlanError(
                f"rank {rank} has {size} bytes for one exchange between ranks; from 1 to {MOST_BYTES} can be sent",
                fix="profile fewer steps, if this is a profile; otherwise this is a bug in meshwright",
            )


def _padded(content: Tensor, sizes: list[int]) -> Tensor:
    return torch.nn.functional.pad(content, (0, max(sizes) - content.numel()))


def _all_read(found: list[Tensor], sizes: list[int], read: Callable[[Any], T]) -> list[T]:
    return [_read(rank, content[:size], read) for rank, (content, size) in enumerate(zip(found, sizes, strict=True))]


def _read(rank: int, content: Tensor, read: Callable[[Any], T]) -> T:
    try:
        return read(json.loads(content.numpy().tobytes()))
    except _WRONG as error:
        raise RunError(f"rank {rank} sent a value of another exchange ({type(error).__name__})") from error
