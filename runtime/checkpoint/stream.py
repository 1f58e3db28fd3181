"""Weights as a stream: full tensors on rank 0, bucket after bucket, in the model's own names.

    for each bucket:   the ranks that hold shards → rank 0 → its reader        then its memory is free

No rank ever holds a second full copy: rank 0 makes a bucket when its reader asks for it, and the others send then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from passes.errors import PlanError
from planner.frozen_plan import Plan
from runtime.checkpoint.adapters_save import adapted_of, gathered
from runtime.checkpoint.filled import filled
from runtime.checkpoint.merged_save import Merge, Merging
from runtime.checkpoint.pretrained_load import hub_of
from runtime.checkpoint.pretrained_save import Entry, entries_of, texts_of, whole_entry
from runtime.distributed.groups import Groups
from runtime.weights.shards import Kept

BUCKET_BYTES = 256 << 20
NAMES = ("hf", "all")
Bucket = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the stream, and the names under which its reader gets it."""

    entry: Entry
    names: tuple[str, ...]
    merging: Merging | None = None


@dataclass(frozen=True)
class Stream:
    """``make``: an item and this rank's shards by name → the full tensor on rank 0, None elsewhere; a call of all
    ranks. ``texts``: config files by name, on rank 0.
    """

    buckets: tuple[tuple[Item, ...], ...]
    make: Callable[[Item, Mapping[str, Tensor]], Tensor | None]
    texts: dict[str, Any]

    def bucket(self, items: Iterable[Item], own: Mapping[str, Tensor]) -> Bucket:
        """The tensors of ``items`` by name on rank 0; ``{}`` elsewhere."""
        found: Bucket = {}
        for item in items:
            tensor = self.make(item, own)
            if tensor is not None:
                found |= dict.fromkeys(item.names, tensor)
        return found


def stream_of(plan: Plan, groups: Groups, kept: Kept, names: str, bucket_bytes: int, *, merged: bool) -> Stream:
    """The same call on every rank. Raises PlanError for names that this model does not have."""
    if names not in NAMES:
        raise PlanError(f"unknown names {names!r}", where="names", fix=f"choose one of: {', '.join(NAMES)}")
    if bucket_bytes < 1:
        raise PlanError(f"bucket_bytes is {bucket_bytes}", where="bucket_bytes", fix="give a positive number of bytes")
    if merged:
        return _merged(plan, groups, kept, bucket_bytes)
    if names == "hf" and hub_of(plan).adapted is not None:
        raise PlanError(
            "peft has wrapped the planned model, and a reader of its base does not know its names",
            where="stream_weights",
            fix="set merged=True for the base with the adapters merged, or names='all' for the model's own names",
        )
    items = [Item(entry, _names_of(entry, names)) for entry in entries_of(plan, groups, kept)]

    def make(item: Item, own: Mapping[str, Tensor]) -> Tensor | None:
        return whole_entry(item.entry, own, groups, kept)

    return Stream(in_buckets(items, bucket_bytes), make, texts_of(plan, kept) if groups.rank == 0 else {})


def _names_of(entry: Entry, names: str) -> tuple[str, ...]:
    aliases = entry.row.aliases if names == "all" and entry.row is not None else ()
    return (entry.name, *aliases)


def _merged(plan: Plan, groups: Groups, kept: Kept, bucket_bytes: int) -> Stream:
    merge = Merge.of(adapted_of(plan), plan.spec.get("precision", {}).get("parameters"), bucket_bytes)
    items = [Item(merging.entry, (merging.entry.name,), merging) for merging in merge.mergings]

    def make(item: Item, own: Mapping[str, Tensor]) -> Tensor | None:
        assert item.merging is not None, item.entry
        values = gathered(plan, own, groups, kept, merge.needed(item.merging))
        return merge.merged(item.merging, values) if groups.rank == 0 else None

    texts = merge.texts(texts_of(plan, kept)) if groups.rank == 0 else {}
    return Stream(in_buckets(items, bucket_bytes), make, texts)


def in_buckets(items: Iterable[Item], most: int) -> tuple[tuple[Item, ...], ...]:
    return tuple(map(tuple, filled(items, lambda item: item.entry.num_bytes, most)))
