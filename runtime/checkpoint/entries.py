"""The tensors of a safetensors directory that is to be written, and the files that they go into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from passes.errors import PlanError
from planner.capture.hub.assembly import Assembly
from planner.sharding.parameters import ParameterPlan
from runtime.checkpoint.safetensors_files import SINGLE

MAX_SHARD_BYTES = 5_000_000_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. ``row``: the parameter that stages hold; None for a tensor that rank 0 holds. ``made``: how it is
    made of the model's tensors, if it is none of these."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    row: ParameterPlan | None = None
    made: Assembly | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def files_of(entries: Iterable[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """File name → its tensors: filled in order up to ``max_bytes``, more only for a tensor that is larger alone."""
    if max_bytes < 1:
        raise PlanError(f"max_shard_bytes is {max_bytes}", fix="give a positive number of bytes")
    parts = filled(entries, lambda entry: entry.num_bytes, max_bytes) or [[]]
    # Wide types first: every tensor then starts at a multiple of its element's size, as readers that map files expect.
    ordered = [sorted(part, key=lambda e: -e.dtype.itemsize) for part in parts]
    names = (
        [SINGLE]
        if len(parts) == 1
        else [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    )
    return dict(zip(names, ordered, strict=True))


def filled(items: Iterable[T], num_bytes: Callable[[T], int], most: int) -> list[list[T]]:
    """``items`` in parts that are filled up to ``most`` bytes; more only for an item that is larger alone."""
    parts: list[list[T]] = []
    size = 0
    for item in items:
        more = num_bytes(item)
        if not parts or size + more > most:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += more
    return parts
