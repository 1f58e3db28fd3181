"""The section of compilation: pieces by their shared functions, and ops that run eagerly, with the reason."""

from __future__ import annotations

from typing import Any

from planner.compiled.rows import CompiledRow
from planner.report.fold import Fold, fold, unfolded
from planner.report.section import TIMES, Section
from planner.tables.tables import Tables


def compiled_section(plan: Tables, *, full: bool) -> Section:
    """Equal pieces of equal blocks share a row."""

    def name(row: CompiledRow) -> str:
        return row.where

    def same(row: CompiledRow) -> Any:
        return row.ops, row.function, row.reason

    folds = unfolded(plan.compiled, name) if full else fold(plan.compiled, name, same)
    columns = ("where", TIMES, "ops", "function", "why not compiled")
    return Section("Compiled", columns, tuple(map(_cells, folds)), _note(plan), frozenset({TIMES, "function"}))


def _cells(item: Fold) -> tuple[str, ...]:
    row: CompiledRow = item.rows[0]
    return item.name, str(len(item.rows)), row.ops, "-" if row.reason else str(row.function), row.reason


def _note(plan: Tables) -> str:
    pieces = [row for row in plan.compiled if not row.reason]
    functions = len({row.function for row in pieces})
    return (
        f"{len(pieces)} pieces share {functions} compiled functions; products with weights, attention and "
        "collectives between them are not compiled. Activation memory is planned for eager ops, an upper bound "
        "for compiled pieces"
    )
