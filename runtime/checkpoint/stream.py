"""Weights as a stream: full tensors on rank 0, bucket after bucket, under the names of files or of the model.

    for each bucket:   the ranks that hold shards → rank 0 → its reader        then its memory is free

No rank ever holds a second full copy: rank 0 makes a bucket when its reader asks for it, and the others send then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.hub_format import in_its_dtype
from planner.frozen_plan import Plan
from runtime.checkpoint.assembled import Read
from runtime.checkpoint.entries import Entry, filled
from runtime.checkpoint.hub_names import check_names, made_tensor
from runtime.checkpoint.merged_save import merge_of_plan, reader_merged
from runtime.checkpoint.pretrained_save import entries_of, named, reader_of, texts_of
from runtime.distributed.groups import Groups
from runtime.weights.shards import Kept

BUCKET_BYTES = 256 << 20
NAMES = ("hf", "model", "all")
Bucket = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the stream, and the names under which its reader gets it."""

    entry: Entry
    names: tuple[str, ...]


@dataclass(frozen=True)
class Stream:
    """``reader``: of this rank's shards by name, copies parts of full tensors to rank 0, in calls of all ranks.
    ``texts``: config files by name, on rank 0. ``leads``: whether this is rank 0.
    """

    buckets: tuple[tuple[Item, ...], ...]
    reader: Callable[[Mapping[str, Tensor]], Read]
    texts: dict[str, Any]
    leads: bool

    def bucket(self, items: Iterable[Item], own: Mapping[str, Tensor]) -> Bucket:
        """The tensors of ``items`` by name on rank 0; ``{}`` elsewhere."""
        found: Bucket = {}
        read = self.reader(own)
        for item in items:
            tensor = made_tensor(item.entry, read, leads=self.leads)
            if tensor is not None:
                found |= dict.fromkeys(item.names, tensor)
        return found


def stream_of(plan: Plan, groups: Groups, kept: Kept, names: str, bucket_bytes: int, *, merged: bool) -> Stream:
    """The same call on every rank. Raises PlanError for names that this model does not have."""
    check_names(names, NAMES)
    if bucket_bytes < 1:
        raise PlanError(f"bucket_bytes is {bucket_bytes}", where="bucket_bytes", fix="give a positive number of bytes")
    if names == "hf" and not merged and plan.hub.adapted is not None:
        raise PlanError(
            "peft has wrapped the planned model, and a reader of its base does not know its names",
            where="stream_weights",
            fix="set merged=True for the base with the adapters merged, or names='all' for the model's own names",
        )
    merge = merge_of_plan(plan) if merged else None
    entries = entries_of(plan, groups, kept) if merge is None else merge.entries
    items = [Item(e, _names_of(e, names)) for e in named(entries, "hf" if names == "hf" else "model", plan, kept)]

    def reader(own: Mapping[str, Tensor]) -> Read:
        if merge is not None:
            return reader_merged(merge, plan, own, groups, kept)
        return reader_of(entries, own, groups, kept)

    texts = in_its_dtype(texts_of(plan, kept)) if groups.rank == 0 else {}
    texts = texts if merge is None else merge.texts(texts)
    return Stream(in_buckets(items, bucket_bytes), reader, texts, groups.rank == 0)


def _names_of(entry: Entry, names: str) -> tuple[str, ...]:
    aliases = entry.row.aliases if names == "all" and entry.row is not None else ()
    return (entry.name, *aliases)


def in_buckets(items: Iterable[Item], most: int) -> tuple[tuple[Item, ...], ...]:
    return tuple(map(tuple, filled(items, lambda item: item.entry.num_bytes, most)))
