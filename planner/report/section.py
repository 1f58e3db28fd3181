"""A section of an explained plan: a title, columns and cells. A column says once how its cells are made of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.report.fold import Fold, fold, unfolded

TIMES = "\N{MULTIPLICATION SIGN}"  # heading: the number of rows in this one

# Columns that may wrap; names and shapes are not wrapped.
PROSE = frozenset(
    {"reason", "what", "fix", "where", "receives", "sends", "order", "names", "inputs", "outputs", "before", "after"}
    | {"choice", "layout"}
)


@dataclass(frozen=True, slots=True)
class Section:
    """A table: every row has one cell for each of ``columns``; those in ``right`` hold numbers."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    right: frozenset[str] = frozenset()
    opened: bool = True  # on a page: else a reader opens it


@dataclass(frozen=True, slots=True)
class Column:
    """``cell``: its text in a row. ``joins``: it is made of all rows that are folded to one, so that these may differ
    in it; otherwise rows are folded only if their cells are equal. ``is_shown``: a column may be left out.
    """

    title: str
    cell: Callable[[Any], str]
    is_number: bool = False
    joins: bool = False
    is_shown: bool = True


def table(title: str, rows: Iterable[Any], columns: Sequence[Column], note: str = "") -> Section:
    """A line for each row."""
    shown = [column for column in columns if column.is_shown]
    cells = tuple(tuple(column.cell(row) for column in shown) for row in rows)
    right = frozenset(column.title for column in shown if column.is_number)
    return Section(title, tuple(column.title for column in shown), cells, note, right)


def folded(
    title: str,
    rows: Iterable[Any],
    name: tuple[str, Callable[[Any], str]],
    columns: Sequence[Column],
    note: str = "",
    *,
    full: bool,
    label: Callable[[str, Any], str] = lambda folded_name, row: folded_name,
) -> Section:
    """A line for all rows that are equal but for the numbers in their names; ``full``: a line for each row.

    ``name``: title of the first column, and the name of a row. ``label``: the text of a line's name, from the folded
    name and its first row.
    """
    alone = [column for column in columns if not column.joins]

    def same(row: Any) -> tuple[str, ...]:
        return label("", row), *(column.cell(row) for column in alone)

    folds = unfolded(rows, name[1]) if full else fold(rows, name[1], same)
    head = [
        Column(name[0], lambda item: label(item.name, item.rows[0])),
        Column(TIMES, lambda item: str(len(item.rows)), is_number=True),
    ]
    return table(title, folds, [*head, *map(_of_fold, columns)], note)


def _of_fold(column: Column) -> Column:
    def cell(item: Fold) -> str:
        return column.cell(item.rows if column.joins else item.rows[0])

    return Column(column.title, cell, column.is_number, is_shown=column.is_shown)
