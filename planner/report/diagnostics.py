"""Diagnostics of a plan: warnings come first and in full, remarks (``info``) of one kind are joined.

linear [384, 128] is sharded (column): its features …     }   linear is sharded (column), 12 times: the first of them
linear [512, 128] is sharded (column): its features …     }
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from planner.report.fold import Fold, fold, unfolded
from planner.report.section import TIMES, Section
from planner.tables.rows import Diagnostic
from planner.tables.tables import Tables

_SIZES = re.compile(r" ?\[[^]]*\]|\d+")


def warnings_section(plan: Tables, full: bool) -> Section:
    """All that is no mere remark."""
    found = [d for d in plan.diagnostics if d.level != "info"]
    rows = tuple(
        (f.rows[0].level, f.name, str(len(f.rows)), f.rows[0].what, f.rows[0].fix) for f in _folds(found, full)
    )
    columns = ("level", "where", TIMES, "what", "fix")
    return Section(f"Warnings ({len(found)})", columns, rows, right=frozenset({TIMES}))


def remarks_section(plan: Tables, full: bool, each: bool = False) -> Section:
    """``each``: those of one kind are not joined."""
    found = [d for d in plan.diagnostics if d.level == "info"]
    folds = _folds(found, full)
    rows = [_row(kind) for kind in ([[f] for f in folds] if full or each else _kinds(folds))]
    note = "" if full or each or len(rows) == len(folds) else "remarks of one kind are merged; --full prints each one"
    columns = ("where", TIMES, "what")
    title = f"Remarks ({len(found)})"
    return Section(title, columns, tuple(rows), note, right=frozenset({TIMES}), opened=False)


def _folds(found: Iterable[Diagnostic], full: bool) -> list[Fold]:
    def name(d: Diagnostic) -> str:
        return d.where

    def same(d: Diagnostic) -> tuple[str, ...]:
        return d.level, d.what, d.fix

    return unfolded(found, name) if full else fold(found, name, same)


def _kinds(folds: Iterable[Fold]) -> list[list[Fold]]:
    """Those that say the same of other sizes, in the order of the first of each."""
    found: dict[str, list[Fold]] = {}
    for item in folds:
        found.setdefault(_kind(item), []).append(item)
    return list(found.values())


def _kind(item: Fold) -> str:
    return _SIZES.sub("", item.rows[0].what.partition(": ")[0])


def _row(kind: list[Fold]) -> tuple[str, ...]:
    first, count = kind[0], sum(len(item.rows) for item in kind)
    if len(kind) == 1:
        return first.name, str(count), first.rows[0].what
    said = {item.rows[0].what for item in kind}
    return f"{first.name}, and more", str(count), said.pop() if len(said) == 1 else _kind(first)
