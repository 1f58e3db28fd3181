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
from planner.sharding.parameters import ParameterPlan
from planner.sharding.parts import Part, part_of
from runtime.checkpoint.adapters_save import adapted_of, gathered
from runtime.checkpoint.filled import filled
from runtime.checkpoint.merged_save import Merge, Merging
from runtime.checkpoint.pretrained_load import hub_of
from runtime.checkpoint.pretrained_save import Entry, entries_of, texts_of, whole_entry
from runtime.checkpoint.safetensors_files import listed
from runtime.distributed.groups import Groups
from runtime.weights.shards import Kept, shard

BUCKET_BYTES = 256 << 20
NAMES = ("hf", "all")
Bucket = dict[str, Tensor]
Shards = dict[int, Bucket]  # by rank of another layout


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


@dataclass(frozen=True)
class Recut:
    """The shards of the ranks of another plan, cut from full tensors."""

    plan: Plan
    rows: dict[str, ParameterPlan]

    @classmethod
    def to(cls, layout: object, stream: Stream) -> Recut:
        """Raises PlanError unless ``layout`` is a plan of this model."""
        if not isinstance(layout, Plan):
            what = f"the layout is a {type(layout).__name__}, not a plan"
            raise PlanError(what, where="layout", fix="give plan(model, spec) of the layout that the reader has")
        rows = {name: row for row in layout.parameters for name in (row.name, *row.aliases)}
        items = {name: item for bucket in stream.buckets for item in bucket for name in item.names}
        wrong = [n for n, item in items.items() if n in rows and tuple(rows[n].shape) != item.entry.shape]
        absent = [row.name for row in layout.parameters if not {row.name, *row.aliases} & items.keys()]
        absent += [name for name, item in items.items() if item.entry.row is not None and name not in rows]
        if wrong or absent:
            raise PlanError(
                f"the layout is of another model: {listed(wrong or absent)}",
                where="layout",
                fix="plan the model that this engine trains",
            )
        return cls(layout, rows)

    def shards(self, bucket: Mapping[str, Tensor]) -> Shards:
        """By rank: its shard of each parameter that it holds, with padding; views where they can be. Tensors that
        are no parameters go to every rank whole."""
        mesh = self.plan.mesh
        return {rank: self._of_rank(mesh.place(rank), bucket) for rank in range(mesh.world_size)}

    def _of_rank(self, place: Mapping[str, int], bucket: Mapping[str, Tensor]) -> Bucket:
        found: Bucket = {}
        for name, tensor in bucket.items():
            row = self.rows.get(name)
            if row is None:
                found[name] = tensor
            elif (part := self._part(row, place)) is not None:
                found[name] = shard(tensor, part)
        return found

    def _part(self, row: ParameterPlan, place: Mapping[str, int]) -> Part | None:
        """None on a rank that does not hold the parameter."""
        mesh = self.plan.mesh
        if place["pp"] not in {mesh.pp_rank_of(stage) for stage in row.stages}:
            return None
        if row.expert is not None and not row.expert.is_held(mesh.ep, place["ep"]):
            return None
        return part_of(row, mesh, place)
