"""JSON that a user gave: plain values, each key once.

Rejected besides invalid JSON: numbers beyond a machine word, NaN and infinity, and characters that no file can
hold. Python's parser limits the depth.
"""

from __future__ import annotations

import json
import re
from os import PathLike
from typing import Any

from passes.errors import PlanError
from planner.files.text import MIB, read_text, shorten

LARGEST = 2**63 - 1
_HALF_A_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(
    path: str | PathLike[str], what: str, *, most_bytes: int = 16 * MIB, fix: str = "", damaged: str = ""
) -> Any:
    """The value of the JSON file at ``path``; ``what``: its kind, for errors. Reads regular files only, up to
    ``most_bytes``.

    Raises PlanError, for bad content with the fix ``damaged``.
    """
    text = read_text(path, what, most_bytes=most_bytes, fix=fix)
    try:
        return parse_json(text)
    except ValueError as error:
        words = f"the {what} is damaged or truncated: {error}"
        raise PlanError(words, where=shorten(path), fix=damaged or fix) from None


def parse_json(text: str) -> Any:
    """The value of ``text``. Raises ValueError with the reason."""
    try:
        value = json.loads(
            text, parse_int=parse_integer, parse_float=_float, parse_constant=_constant, object_pairs_hook=_object
        )
        if _HALF_A_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a string contains a lone surrogate (half a character)") from None
    return value


def parse_integer(digits: str) -> int:
    """Raises ValueError if no machine word holds the number."""
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
