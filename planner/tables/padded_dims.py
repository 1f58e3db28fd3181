"""Dims of activations that tp does not divide, as a sequence of 17 tokens: ranks hold equal parts of a padded one."""

from __future__ import annotations

from collections.abc import Iterator

from passes.blocks.places import Places
from passes.program.ops.aten import shape_of
from planner.decisions import Decisions
from planner.sharding.shards import Shards
from planner.tables.rows import Diagnostic


def padded_notes(decisions: Decisions, shards: Shards, places: Places) -> Iterator[Diagnostic]:
    """One note for each size, at the first value that is gathered or scattered along it."""
    told = set[tuple[int, int]]()
    for change in (change for of_stage in shards.changes for change in of_stage):
        cut = change.before if change.before.is_sharded else change.after
        value = decisions.program.node(change.value)
        if not cut.padding or not value.meta.get("grad"):
            continue
        size, held = shape_of(value)[cut.dim], cut.local_size(decisions.placements.size(value))
        if (size, held) not in told:
            told.add((size, held))
            yield Diagnostic(
                "info",
                f"dim {cut.dim} = {size} is padded to {size + cut.padding} over {change.axis}: each rank holds "
                f"{held}, and no sum includes padding",
                places.text(value),
            )
