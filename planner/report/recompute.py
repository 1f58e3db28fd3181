"""The section of recomputation in blocks."""

from __future__ import annotations

from typing import Any

from planner.recompute.rows import RecomputeRow
from planner.report.fold import Fold, fold, unfolded
from planner.report.section import TIMES, Section
from planner.tables.tables import Tables


def recompute_section(plan: Tables, *, full: bool) -> Section:
    """The recomputed ops, line by line; equal blocks share a row."""

    def name(row: RecomputeRow) -> str:
        return row.where if row.where.startswith(row.block) else f"{row.block} {row.where}"

    def same(row: RecomputeRow) -> Any:
        return row.kind, row.ops, row.bytes, row.flops, row.moved

    folds = unfolded(plan.recompute, name) if full else fold(plan.recompute, name, same)
    columns = ("where", TIMES, "kind", "ops", "freed", "FLOPs", "bytes moved")
    right = frozenset({TIMES, "freed", "FLOPs", "bytes moved"})
    return Section("Recompute", columns, tuple(map(_cells, folds)), _note(plan), right)


def _cells(item: Fold) -> tuple[str, ...]:
    row: RecomputeRow = item.rows[0]
    return item.name, str(len(item.rows)), row.kind, row.ops, f"{row.bytes:,}", f"{row.flops:,}", f"{row.moved:,}"


def _note(plan: Tables) -> str:
    lines = []
    for stage in sorted({row.stage for row in plan.recompute}):
        mine = [row for row in plan.recompute if row.stage == stage]
        given, flops, moved = (sum(getattr(row, key) for row in mine) for key in ("bytes", "flops", "moved"))
        lines.append(
            f"stage {stage}: {given:,} bytes freed, {flops:,} FLOPs and {moved:,} bytes moved to recompute them"
        )
    return "\n".join(["per microbatch on one rank", *lines])
