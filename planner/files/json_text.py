"""JSON that a user gave: plain values within limits, each key once.

Refused beside what is no JSON: nesting beyond what any of our files has, numbers that no machine word holds, NaN and
infinity, characters that no file can hold, and more values than memory should be spent on.
"""

from __future__ import annotations

import json
import re
from os import PathLike
from typing import Any

from planner.errors import PlanError
from planner.files.text import MIB, read_text, shorten

MOST_DEPTH = 64
MOST_VALUES = 4_000_000  # each takes up to about 100 bytes once it is read
LARGEST = 2**63 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_json(
    path: str | PathLike[str], what: str, *, most_bytes: int = 16 * MIB, fix: str = "", damaged: str = ""
) -> Any:
    """The value of the JSON file at ``path``; ``what`` it is. Reads regular files alone, up to ``most_bytes``.

    Raises PlanError, for bad content with the fix ``damaged``.
    """
    text = read_text(path, what, most_bytes=most_bytes, fix=fix)
    try:
        return parse_json(text)
    except ValueError as error:
        words = f"the {what} is damaged or cut short: {error}"
        raise PlanError(words, where=shorten(path), fix=damaged or fix) from None


def parse_json(text: str) -> Any:
    """The value of ``text``. Raises ValueError with the reason."""
    if sum(text.count(mark) for mark in "[{,") > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        value = json.loads(
            text, parse_int=_integer, parse_float=_float, parse_constant=_constant, object_pairs_hook=_object
        )
    except RecursionError:
        raise ValueError(f"nested more than {MOST_DEPTH} deep") from None
    _check(value)
    return value


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -LARGEST <= (value := int(digits)) <= LARGEST:
        raise ValueError(f"the number {shorten(digits, 40)} is too large")
    return value


def _float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {shorten(digits, 40)} is too large")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {shorten(twice, 100)!r} is given twice")
    return found


def _check(value: Any) -> None:
    """Depth and characters, without recursion."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str) and not item.isascii() and _SURROGATE.search(item):
                raise ValueError("a string holds half a character (a lone surrogate)")
            if isinstance(item, dict):
                below.extend(item.keys())
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return
        level = below
    raise ValueError(f"nested more than {MOST_DEPTH} deep")
