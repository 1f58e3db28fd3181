"""One thing that two plans say otherwise: its values before and after, and how far apart they are in words.

12.00 MiB -> 18.00 MiB     6.00 MiB more (+50.0%)
3 -> 1                     2 less (-66.7%)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from planner.tables.sizes import format_bytes

BYTES, SECONDS, SHARE, FLOPS = "bytes", "seconds", "share", "flops"
NUMBER = "number"  # of a stage: it measures nothing
ROW = "row"  # the field of a change of a full row, added or removed
NONE = "-"
_LONG = 200  # characters of a value that are shown


@dataclass(frozen=True, slots=True)
class Change:
    """``field`` of ``count`` rows of a table, all alike; ``name`` is their folded name. A value is None if there is
    none.

    ``before`` and ``after`` are JSON values of the first of them in ``unit``; ``shown``: both for eyes.
    """

    table: str
    name: str
    field: str
    before: Any
    after: Any
    shown: tuple[str, str]
    unit: str = ""
    count: int = 1

    @property
    def difference(self) -> str:
        """The difference in words; for a row, whether it was added or removed."""
        if self.field == ROW:
            return "came" if self.before is None else "went"
        if _is_number(self.before) and _is_number(self.after) and self.unit != NUMBER:
            return _far_apart(self.before, self.after, self.unit)
        return ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        keys = ("table", "name", "count", "field", "before", "after", "unit", "difference")
        return {key: getattr(self, key) for key in keys}


def change(table: str, name: str, field: str, before: Any, after: Any, unit: str = "") -> Change:
    """A change of a plain value, shown in its unit."""
    return Change(table, name, field, before, after, both(before, after, unit), unit)


def both(before: Any, after: Any, unit: str = "") -> tuple[str, str]:
    """Two values as text, with enough digits to differ."""
    pairs = ((show(before, unit), show(after, unit)), (_exact(before), _exact(after)))
    return _around(*next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1]))


def _around(before: str, after: str) -> tuple[str, str]:
    """Of long texts the part in which they differ."""
    if max(len(before), len(after)) <= _LONG:
        return before, after
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    start = max(0, alike - _LONG // 4)
    first, second = ("…" * (start > 0) + text[start : start + _LONG] for text in (before, after))
    return first + "…" * (len(before) > start + _LONG), second + "…" * (len(after) > start + _LONG)


def show(value: Any, unit: str = "") -> str:
    """One value for eyes."""
    if _is_number(value) and unit in _UNITS:
        return _UNITS[unit](value)
    return _exact(value)


def _exact(value: Any) -> str:
    if value is None or value == "":
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _is_number(value):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_exact(item)}" for key, item in value.items()) or NONE
    return f"[{', '.join(map(_exact, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _far_apart(before: float, after: float, unit: str) -> str:
    if unit == SHARE:
        return f"{abs(after - before) * 100:.1f} points {'more' if after > before else 'less'}"
    apart = show(abs(after - before), unit)
    share = f" (×{after / before:.2f})" if before > 0 and after >= 2 * before else ""
    if before and not share:
        share = f" ({(after - before) / abs(before):+.1%})"
    return f"{apart} {'more' if after > before else 'less'}{share}"


_UNITS: dict[str, Callable[[Any], str]] = {
    BYTES: lambda value: format_bytes(int(value)),
    SECONDS: lambda value: f"{value * 1e3:,.3f} ms",
    FLOPS: lambda value: f"{value / 1e12:,.3f} TFLOP",
    SHARE: lambda value: f"{value:.1%}",
}
