"""Compare two plans: each value of their JSON that differs, by table, row and field.

    parameters  h.{0,1}.mlp.up.weight  2  local_shape  [16, 8]  [32, 8]

Rows of both plans are matched by the fields in ``KEYS``. Equal changes of repeated blocks are one line.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from itertools import groupby, takewhile
from typing import Any

from planner.report.section import TIMES, Section, fold
from planner.report.text import sections_text
from planner.tables.tables import Tables

NOTHING = "no differences: the plans are equal"
COLUMNS = ("what", TIMES, "field", "before", "after")
KEYS: dict[str, tuple[str, ...]] = {
    "parameters": ("name",),
    "collectives": ("where", "block", "kind", "axis", "phase", "per", "again"),
    "stages": ("index",),
    "experts": ("block",),
    "graph_regions": ("block", "scope"),
    "graph_slots": ("pp_rank", "chunk"),
    "recompute": ("where", "block", "kind"),
    "compiled": ("where", "block"),
    "lengths": ("length",),
    "memory": ("pp_rank",),
    "diagnostics": ("where", "level", "what"),
}
ROW = "row"  # the field of a change if only one plan has the row
_PLACES = {"stage", "stages", "pp_rank", "chunk"}  # numbers that differ from block to block
_LONG = 120  # maximum number of characters printed of a value
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """An equal change of ``field`` in ``count`` rows of a table with the folded name ``name``; values as in JSON."""

    table: str
    name: str
    field: str
    before: Any
    after: Any
    count: int = 1


@dataclass(frozen=True, slots=True)
class Differences:
    """The changes from one plan to another. ``same_decisions``: only estimates, diagnostics or remarks differ."""

    changes: tuple[Change, ...]
    same_decisions: bool

    @property
    def any(self) -> bool:
        return bool(self.changes)

    def to_dict(self) -> dict[str, Any]:
        changes = [asdict(change) for change in self.changes]
        return {"different": self.any, "same_decisions": self.same_decisions, "changes": changes}


def differences(before: Tables, after: Tables) -> Differences:
    """Return all changes from ``before`` to ``after``."""
    old, new = before.to_dict(), after.to_dict()
    changes = [change for table in new for change in _of_table(table, old[table], new[table])]
    return Differences(tuple(changes), before.hash() == after.hash())


def _of_table(table: str, before: Any, after: Any) -> list[Change]:
    if table not in KEYS:
        return [Change(table, table, *values) for values in _fields(before, after)]
    old, new, changes = _by_key(table, before), _by_key(table, after), list[Change]()
    for key in dict.fromkeys((*new, *old)):
        is_in_both = key in old and key in new
        values = _fields(old[key], new[key]) if is_in_both else [(ROW, old.get(key), new.get(key))]
        changes += [Change(table, _name(table, key), *leaf) for leaf in values]
    if not changes and before != after:
        return [Change(table, table, "order", "as listed", "in another order", len(after))]
    return list(_folded(changes))


def _by_key(table: str, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return key → row; rows with equal keys are numbered in their order."""
    seen, by_key = Counter[Hashable](), dict[tuple[Any, ...], Mapping[str, Any]]()
    for row in rows:
        key = tuple(_module(row[name]) if name == "where" else row[name] for name in KEYS[table])
        by_key[*key, seen[key]] = row
        seen[key] += 1
    return by_key


def _module(where: str) -> str:
    """Return the place without its source line, which moves when the file is edited."""
    return where.partition("   (")[0]


def _name(table: str, key: tuple[Any, ...]) -> str:
    """Return the printed name of a row. Its first word, which may be folded, is a name, a block, or ``pp_rank.0``."""
    *values, number = key
    fields = dict(zip(KEYS[table], values, strict=True))
    if fields.get("where"):
        fields.pop("block", None)
    parts = [
        f"{n}.{v}" if type(v) is int else str(v) for n, v in fields.items() if v is not None and type(v) is not bool
    ]
    return " ".join(filter(None, parts)) + (f" {number}" if number else "")


def _rest(table: str, row: Any, without: Set[str] = frozenset()) -> Any:
    """Return a row without the fields in its name, and those in ``without``."""
    return row and {name: value for name, value in row.items() if name not in KEYS[table] and name not in without}


def _fields(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, before, after) of each leaf that differs, inside mappings and lists of mappings or lists."""
    if before == after:
        return
    pairs = _items(before), _items(after)
    if pairs[0] is None or pairs[1] is None:
        yield path, None if before is _ABSENT else before, None if after is _ABSENT else after
        return
    for key in dict.fromkeys((*pairs[1], *pairs[0])):
        inner = f"{path}.{key}" if path else str(key)
        yield from _fields(pairs[0].get(key, _ABSENT), pairs[1].get(key, _ABSENT), inner)


def _items(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a mapping or a list, None for a leaf."""
    if isinstance(value, Mapping):
        return value
    is_nested = isinstance(value, list) and value and all(isinstance(item, (dict, list)) for item in value)
    return dict(enumerate(value)) if is_nested and not _is_order(value) else None


def _is_order(value: list[Any]) -> bool:
    """Return whether ``value`` is the order of a rank's actions, each [kind, microbatch, chunk]."""
    return all(isinstance(item, list) and item and isinstance(item[0], str) for item in value)


def _folded(changes: Sequence[Change]) -> Iterator[Change]:
    for item in fold(changes, lambda change: change.name, lambda change: (change.field, _alike(change))):
        yield replace(item.rows[0], name=item.name, count=len(item.rows))


def _alike(change: Change) -> str:
    values = change.before, change.after
    if change.field == ROW:
        values = tuple(_rest(change.table, row, _PLACES) for row in values)
    return str(values)


def differences_text(compared: Differences, before: str, after: str) -> str:
    """Return the changes as plain text, by table. ``before`` and ``after``: names of the two plans."""
    if not compared.any:
        return f"{NOTHING}\n"
    lines = [f"before  {before}", f"after   {after}"]
    if compared.same_decisions:
        lines.append("both plans make the same decisions: only estimates, diagnostics or remarks differ")
    sections = [Section("Differences", note="\n".join(lines))]
    for table, changes in groupby(compared.changes, lambda change: change.table):
        rows = ((c.name, str(c.count), c.field, *_shown(c)) for c in changes)
        sections.append(Section(table.replace("_", " ").capitalize(), COLUMNS, tuple(rows), right=frozenset({TIMES})))
    return sections_text(sections)


def _shown(change: Change) -> tuple[str, str]:
    """Return both values as text; of long values, only the part around the first difference."""
    is_row = change.field == ROW
    first, second = (_text(_rest(change.table, v) if is_row else v) for v in (change.before, change.after))
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    start = max(0, alike - _LONG // 4) if max(len(first), len(second)) > _LONG else 0
    parts = [
        "…" * (start > 0) + text[start : start + _LONG] + "…" * (len(text) > start + _LONG) for text in (first, second)
    ]
    return parts[0], parts[1]


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item not in ("", None, []))
    if isinstance(value, list):
        return " ".join(map(_action, value)) if value and _is_order(value) else f"[{', '.join(map(_text, value))}]"
    return str(value)


def _action(action: Sequence[Any]) -> str:
    kind, microbatch, chunk = action
    return f"{kind}{microbatch}" + (f".{chunk}" if chunk else "")
