"""Pair the rows of one table of two plans by a key, and compare them field by field.

No field is left out: those that a table shows together (``Column``) are compared together, each other one for itself.
Rows without a partner came or went. Equal changes of repeated blocks are one change.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from planner.report.differences.change import BYTES, NUMBER, ROW, Change, both
from planner.report.fold import Fold, fold
from planner.tables.codec import encode

REMARKS = "Remarks"  # places and origins: words for people, that decide nothing
_REMARKS = ("where", "origin")
_NUMBERS = ("stage", "chunk", "pp_rank", "index")


class Column(NamedTuple):
    """``fields`` of a row that are one thing to a reader; ``show`` says it."""

    name: str
    fields: tuple[str, ...]
    show: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Table:
    """How to read one table. ``name`` of a row; numbers in its first word fold; ``key``: pairs two rows.

    ``tell``: a full row in a line. ``block``: the block of a row, or "". ``moves``: fields that change for all rows of
    a block at once. ``apart``: names that differ from block to block; only their number counts for a fold.
    """

    title: str
    name: Callable[[Any], str]
    key: Callable[[Any], Hashable]
    tell: Callable[[Any], str]
    columns: tuple[Column, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    block: Callable[[Any], str] = lambda _: ""
    moves: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()


class _One(NamedTuple):
    """A change of one row, before any is folded."""

    row: Any
    change: Change


def changes_of(table: Table, before: Sequence[Any], after: Sequence[Any]) -> list[Change]:
    """The differences of ``after`` from ``before``, in the order of ``after``. Empty only if both are equal."""
    pairs, order_differs = _paired(table, before, after)
    found = [_One(new if new is not None else old, c) for old, new in pairs for c in _compared(table, old, new)]
    sizes = Counter(table.block(new) for old, new in pairs if old is not None and new is not None)
    changes = list(_folded(table, _of_blocks(table, found, sizes)))
    if not changes and order_differs:
        other = ("as listed", "in a different order")
        return [Change(table.title, "rows", "order", other[0], other[1], other, count=len(after))]
    return changes


def _paired(table: Table, before: Sequence[Any], after: Sequence[Any]) -> tuple[list[tuple[Any, Any]], bool]:
    """Rows of both by key, (None, row) if added, (row, None) if removed; whether partners change places."""
    old, new = _by_key(table, before), _by_key(table, after)
    went = [(row, None) for key, row in old.items() if key not in new]
    kept = [key for key in old if key in new]
    return [(old.get(key), row) for key, row in new.items()] + went, kept != [key for key in new if key in old]


def _by_key(table: Table, rows: Sequence[Any]) -> dict[Hashable, Any]:
    """Rows with equal keys are numbered in their order."""
    seen, found = Counter[Hashable](), dict[Hashable, Any]()
    for row in rows:
        key = table.key(row)
        found[key, seen[key]] = row
        seen[key] += 1
    return found


def _compared(table: Table, old: Any, new: Any) -> Iterator[Change]:
    if old is None or new is None:
        row = new if old is None else old
        values = (None, encode(row)) if old is None else (encode(row), None)
        shown = tuple("-" if value is None else table.tell(row) for value in values)
        yield Change(table.title, table.name(row), ROW, *values, (shown[0], shown[1]))
        return
    if old == new:
        return
    grouped = {name for column in table.columns for name in column.fields}
    for column in table.columns:
        yield from _column(table, column, old, new)
    for item in fields(new):
        if item.compare and item.name not in grouped:
            yield from _field(table, item.name, old, new)


def _column(table: Table, column: Column, old: Any, new: Any) -> Iterator[Change]:
    differ = [name for name in column.fields if getattr(old, name) != getattr(new, name)]
    if not differ:
        return
    before, after = ({name: encode(getattr(row, name)) for name in differ} for row in (old, new))
    shown = (column.show(old), column.show(new))
    yield Change(
        table.title, table.name(new), column.name, before, after, shown if shown[0] != shown[1] else both(before, after)
    )


def _field(table: Table, name: str, old: Any, new: Any) -> Iterator[Change]:
    before, after = encode(getattr(old, name)), encode(getattr(new, name))
    if before == after:
        return
    unit = table.units.get(name, BYTES if name == "bytes" or name.endswith("_bytes") else "")
    unit = NUMBER if name in _NUMBERS else unit
    is_remark = name in _REMARKS
    label = f"{name} ({table.title.lower()})" if is_remark else name.replace("_", " ")
    title = REMARKS if is_remark else table.title
    yield Change(title, table.name(new), label, before, after, both(before, after, unit), unit)


def _of_blocks(table: Table, found: list[_One], sizes: Counter[str]) -> list[_One]:
    """If all rows of a block change alike, as when it moves to another stage, the block changes."""
    alike = defaultdict[Hashable, list[_One]](list)
    for one in found:
        block = table.block(one.row) if one.change.field in table.moves else ""
        alike[(block, one.change.field, one.change.shown) if block else id(one)].append(one)
    joined = list[_One]()
    for members in alike.values():
        block = table.block(members[0].row)
        if len(members) > 1 and len(members) == sizes[block]:
            rows = f"all {len(members)} of a block"
            joined.append(_One(members[0].row, replace(members[0].change, name=f"{block} {rows}", count=len(members))))
        else:
            joined += members
    return joined


def _folded(table: Table, found: list[_One]) -> Iterator[Change]:
    def name(one: _One) -> str:
        return one.change.name

    def same(one: _One) -> Hashable:
        change = one.change
        shown = tuple(text.count(",") for text in change.shown) if change.field in table.apart else change.shown
        return (
            change.table,
            change.field,
            shown,
            change.count,
            repr((change.before, change.after)) * (change.field not in (*table.apart, ROW)),
        )

    for item in fold(found, name, same):
        yield _together(item)


def _together(item: Fold) -> Change:
    first: Change = item.rows[0].change
    return replace(first, name=item.name, count=sum(one.change.count for one in item.rows))
