"""The section of experts: their ranks, the bytes of dispatch, and the groups of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.mesh import Mesh
from planner.report.fold import Fold, fold, unfolded
from planner.report.section import TIMES, Section
from planner.tables.experts import ExpertsPlan
from planner.tables.tables import Tables

SHOWN = 8  # ranks, or groups, that still read well one by one


def experts_section(plan: Tables, *, full: bool) -> Section:
    """A row for each layer and ep rank; equal layers once."""

    def name(row: ExpertsPlan) -> str:
        return row.block

    def same(row: ExpertsPlan) -> Any:
        return row.num_experts, row.top_k, row.how, row.ranks, row.bytes, row.sends

    folds = unfolded(plan.experts, name) if full else fold(plan.experts, name, same)
    rows = tuple(cells for item in folds for cells in _cells(item))
    columns = ("block", TIMES, "experts", "per token", "dispatch", "ep rank", "has", "on ranks", "sends", "sent")
    right = frozenset({TIMES, "experts", "per token", "ep rank", "sent"})
    return Section("Experts", columns, rows, _groups(plan.mesh) if rows else "", right)


def _cells(item: Fold) -> list[tuple[str, ...]]:
    row: ExpertsPlan = item.rows[0]
    head = item.name, str(len(item.rows)), str(row.num_experts), str(row.top_k), row.how
    if not row.ranks:
        return [(*head, "-", "all", "every rank", "-", "-")]
    each = row.num_experts // len(row.ranks)
    lines = []
    for ep_rank, ranks in enumerate(row.ranks):
        first = ep_rank * each
        has = str(first) if each == 1 else f"{first} to {first + each - 1}"
        lines.append((str(ep_rank), has, _shortened([str(r) for r in ranks]), row.sends, f"{row.bytes:,}"))
    if len(lines) > SHOWN:
        lines = [*lines[:2], ("…",) * 5, lines[-1]]
    empty = ("",) * len(head)
    return [(*(head if i == 0 else empty), *cells) for i, cells in enumerate(lines)]


def _groups(mesh: Mesh) -> str:
    """The groups of the first stage, of axes that have more than one rank."""
    if not mesh.has_expert_axes:
        return "experts are sharded like other matrices; `mesh.ep` would distribute them over ranks"
    lines = [
        "sent: bytes that a rank dispatches for one microbatch; the combine returns as many. Tokens that go once to a "
        "rank with several of their experts are counted as for equally likely choices",
        "grouped products add weight gradients to the buffer expert by expert; if one kernel multiplies all "
        "experts (bfloat16 on Hopper or later), one kernel also computes their gradient, which is added at once",
    ]
    for axis, token in (("etp", "tp"), ("ep", "ep"), ("edp", "dp")):
        if mesh.size(axis) > 1:
            groups = [f"[{_shortened([str(r) for r in group])}]" for group in mesh.expert_groups(token)]
            lines.append(f"{axis:4} groups  {_shortened(groups)}")
    return "\n".join(lines)


def _shortened(items: Sequence[str]) -> str:
    if len(items) <= SHOWN:
        return ", ".join(items)
    return f"{', '.join(items[:3])}, … {items[-1]} ({len(items)})"
