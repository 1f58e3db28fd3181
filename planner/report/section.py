"""A section of a printed plan: a title, columns and cells. A column defines how its cells are made from rows.

Rows that differ only in a number inside a dotted name are folded: ``h.0.attn``, ``h.1.attn`` are ``h.{0,1}.attn``,
twice. A fold represents exactly its rows: it joins one number of the name at a time, and only items with equal other
parts and equal numbers of rows, so that expanding the ranges gives every name equally often.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

_MOST_PARTS = 100  # of a dotted name: no model nests modules deeper
TIMES = "\N{MULTIPLICATION SIGN}"  # heading of the number of folded rows
# Columns that may wrap; names and shapes are not wrapped.
PROSE = frozenset(
    {"reason", "what", "fix", "where", "receives", "sends", "order", "names", "inputs", "outputs", "before", "after"}
    | {"choice", "layout"}
)


@dataclass(frozen=True, slots=True)
class Fold:
    """``rows`` that are printed as one; ``name`` has ranges for the numbers in which their names differ."""

    name: str
    rows: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Item:
    parts: tuple[str, ...]
    key: tuple[Hashable, ...]  # equal in all folded items; first the words after the name
    rows: tuple[Any, ...]


def fold(
    rows: Iterable[Any], name: Callable[[Any], str], same: Callable[[Any], Hashable], *, full: bool = False
) -> list[Fold]:
    """Fold rows that are equal under ``same``, in the order of their first rows. ``full``: do not fold.

    Only the first word of ``name(row)`` is folded; the rest, a place in a file, must be equal.
    """
    if full:
        return [Fold(name(row), (row,)) for row in rows]
    items = []
    for row in rows:
        head, _, tail = name(row).partition(" ")
        items.append(_Item(tuple(head.split(".", _MOST_PARTS)), (tail, same(row)), (row,)))
    items = _join(items, lambda item: (item.parts, item.key), lambda members: members[0].parts)
    for position in range(max((len(item.parts) for item in items), default=0)):
        items = _join(items, lambda item, at=position: _all_but_number(item, at), lambda m, at=position: _range(m, at))
    return [Fold(" ".join(filter(None, (".".join(i.parts), str(i.key[0])))), i.rows) for i in items]


def names_text(names: Iterable[str]) -> str:
    return ", ".join(item.name for item in fold(names, str, lambda _: None))


def _join(
    items: list[_Item], key: Callable[[_Item], Hashable], parts: Callable[[list[_Item]], tuple[str, ...]]
) -> list[_Item]:
    groups: dict[Hashable, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [_Item(parts(m), m[0].key, tuple(row for item in m for row in item.rows)) for m in groups.values()]


def _all_but_number(item: _Item, position: int) -> Hashable:
    is_number = position < len(item.parts) and item.parts[position].isdecimal() and len(item.parts[position]) < 19
    others = tuple("" if is_number and i == position else part for i, part in enumerate(item.parts))
    return is_number, others, item.key, len(item.rows)


def _range(members: list[_Item], position: int) -> tuple[str, ...]:
    parts = members[0].parts
    if len(members) == 1:
        return parts
    numbers = ranges(int(item.parts[position]) for item in members)
    return (*parts[:position], f"{{{numbers}}}", *parts[position + 1 :])


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as runs: 0, 1, 2, 3, 7 is ``0..3,7``; a run of two is ``0,1``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


@dataclass(frozen=True, slots=True)
class Section:
    """A table: every row has one cell for each of ``columns``; those in ``right`` hold numbers."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""
    right: frozenset[str] = frozenset()
    opened: bool = True  # on a page; a closed table shows only its title at first


@dataclass(frozen=True, slots=True)
class Column:
    """``cell``: the text of a row. ``joins``: ``cell`` gets all rows of a fold, which may differ in this column; only
    rows with equal cells in the other columns are folded. ``is_shown``: False leaves the column out.
    """

    title: str
    cell: Callable[[Any], str]
    is_number: bool = False
    joins: bool = False
    is_shown: bool = True


def numbers(keys: Mapping[str, str], form: str = "") -> list[Column]:
    """Return columns of numbers. ``keys``: title → attribute of a row."""
    return [Column(t, lambda row, key=key: format(getattr(row, key), form), is_number=True) for t, key in keys.items()]


def texts(*keys: str) -> list[Column]:
    """Return columns of texts. ``keys``: attributes of a row, which are also the titles."""
    return [Column(key, attrgetter(key)) for key in keys]


def table(title: str, rows: Iterable[Any], columns: Sequence[Column], note: str = "") -> Section:
    shown = [column for column in columns if column.is_shown]
    cells = tuple(tuple(column.cell(row) for column in shown) for row in rows)
    right = frozenset(column.title for column in shown if column.is_number)
    return Section(title, tuple(column.title for column in shown), cells, note, right)


class Named(NamedTuple):
    """The first column: its ``title``, the name ``of`` a row, and the ``label`` of a folded name and its first row."""

    title: str
    of: Callable[[Any], str]
    label: Callable[[str, Any], str] = lambda folded_name, row: folded_name


def folded(
    title: str, rows: Iterable[Any], name: Named, columns: Sequence[Column], note: str = "", *, full: bool
) -> Section:
    """Return a table with one line for all rows that differ only in numbers of their names; ``full``: do not fold."""
    alone = [column for column in columns if not column.joins]

    def same(row: Any) -> tuple[str, ...]:
        return name.label("", row), *(column.cell(row) for column in alone)

    head = [
        Column(name.title, lambda item: name.label(item.name, item.rows[0])),
        Column(TIMES, lambda item: str(len(item.rows)), is_number=True),
    ]
    return table(title, fold(rows, name.of, same, full=full), [*head, *map(_of_fold, columns)], note)


def _of_fold(column: Column) -> Column:
    def cell(item: Fold) -> str:
        return column.cell(item.rows if column.joins else item.rows[0])

    return Column(column.title, cell, column.is_number, is_shown=column.is_shown)
