"""Two plans side by side: each value of their JSON that differs, by table, row and field.

    parameters  h.{0,1}.mlp.up.weight  2  local_shape  [16, 8]  [32, 8]

Rows find their partners by the fields in ``KEYS``. Equal changes of repeated blocks are one line.
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
ROW = "row"  # the field of a full row, of which the other plan has none
_PLACES = {"stage", "stages", "pp_rank", "chunk"}  # numbers that differ from block to block
_LONG = 120  # characters of a value that are shown
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """``field`` of ``count`` rows of a table, all alike, the folded name of which is ``name``; values as in JSON."""

    table: str
    name: str
    field: str
    before: Any
    after: Any
    count: int = 1


@dataclass(frozen=True, slots=True)
class Differences:
    """Of ``after`` from ``before``. ``same_decisions``: both run the same, and only estimates or remarks differ."""

    changes: tuple[Change, ...]
    same_decisions: bool

    @property
    def any(self) -> bool:
        return bool(self.changes)

    def to_dict(self) -> dict[str, Any]:
        changes = [asdict(change) for change in self.changes]
        return {"different": self.any, "same_decisions": self.same_decisions, "changes": changes}


def differences(before: Tables, after: Tables) -> Differences:
    old, new = before.to_dict(), after.to_dict()
    found = [change for table in new for change in _of_table(table, old[table], new[table])]
    return Differences(tuple(found), before.hash() == after.hash())


def _of_table(table: str, before: Any, after: Any) -> list[Change]:
    if table not in KEYS:
        return [Change(table, table, *values) for values in _fields(before, after)]
    old, new, found = _by_key(table, before), _by_key(table, after), list[Change]()
    for key in dict.fromkeys((*new, *old)):
        is_in_both = key in old and key in new
        values = _fields(old[key], new[key]) if is_in_both else [(ROW, old.get(key), new.get(key))]
        found += [Change(table, _name(table, key), *leaf) for leaf in values]
    if not found and before != after:
        return [Change(table, table, "order", "as listed", "in another order", len(after))]
    return list(_folded(found))


def _by_key(table: str, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Rows with equal keys are numbered in their order."""
    seen, found = Counter[Hashable](), dict[tuple[Any, ...], Mapping[str, Any]]()
    for row in rows:
        key = tuple(_module(row[name]) if name == "where" else row[name] for name in KEYS[table])
        found[*key, seen[key]] = row
        seen[key] += 1
    return found


def _module(where: str) -> str:
    """Without the user's line, which moves when the file is edited."""
    return where.partition("   (")[0]


def _name(table: str, key: tuple[Any, ...]) -> str:
    """The first word may be folded: a name, a block, or ``pp_rank.0``."""
    *values, number = key
    given = dict(zip(KEYS[table], values, strict=True))
    if given.get("where"):
        given.pop("block", None)
    parts = [
        f"{n}.{v}" if type(v) is int else str(v) for n, v in given.items() if v is not None and type(v) is not bool
    ]
    return " ".join(filter(None, parts)) + (f" {number}" if number else "")


def _rest(table: str, row: Any, without: Set[str] = frozenset()) -> Any:
    """A row without the fields that its name says."""
    return row and {name: value for name, value in row.items() if name not in KEYS[table] and name not in without}


def _fields(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ: mappings and lists of these are taken apart."""
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
    """None for a leaf."""
    if isinstance(value, Mapping):
        return value
    is_nested = isinstance(value, list) and value and all(isinstance(item, (dict, list)) for item in value)
    return dict(enumerate(value)) if is_nested and not _is_order(value) else None


def _is_order(value: list[Any]) -> bool:
    """A rank's actions, [kind, microbatch, chunk] each."""
    return all(isinstance(item, list) and item and isinstance(item[0], str) for item in value)


def _folded(changes: Sequence[Change]) -> Iterator[Change]:
    for found in fold(changes, lambda change: change.name, lambda change: (change.field, _alike(change))):
        yield replace(found.rows[0], name=found.name, count=len(found.rows))


def _alike(change: Change) -> str:
    values = change.before, change.after
    if change.field == ROW:
        values = tuple(_rest(change.table, row, _PLACES) for row in values)
    return str(values)


def differences_text(found: Differences, before: str, after: str) -> str:
    """Plain text, a table for each of the plan's; ``before`` and ``after``: names of the two plans."""
    if not found.any:
        return f"{NOTHING}\n"
    lines = [f"before  {before}", f"after   {after}"]
    if found.same_decisions:
        lines.append("both plans make the same decisions: only estimates, diagnostics or remarks differ")
    sections = [Section("Differences", note="\n".join(lines))]
    for table, changes in groupby(found.changes, lambda change: change.table):
        rows = ((c.name, str(c.count), c.field, *_shown(c)) for c in changes)
        sections.append(Section(table.replace("_", " ").capitalize(), COLUMNS, tuple(rows), right=frozenset({TIMES})))
    return sections_text(sections)


def _shown(change: Change) -> tuple[str, str]:
    """Two values as text; of long ones the part in which they differ."""
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
