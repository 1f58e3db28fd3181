"""``--data a.tokens=0.7 --data b.tokens=0.3``: the texts of a run and the share of each."""

from __future__ import annotations

import math
from pathlib import Path

from planner.errors import PlanError


def read_mixture(given: list[str]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The one text without a share, or the first of several and all of them with theirs.

    Raises PlanError where a share is missing, or no positive number.
    """
    parts = [_part(text) for text in given]
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0], ()
    found = []
    for source, weight in parts:
        if weight is None or not 0 < weight < math.inf:
            what = f"--data {source} has no share" if weight is None else f"--data {source}: {weight:g} is no share"
            raise PlanError(what, where="--data", fix="write --data PATH=SHARE for each of several: --data a.txt=0.7")
        found.append((source, weight))
    return found[0][0], tuple(found)


def _part(text: str) -> tuple[str, float | None]:
    source, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, None
    try:
        return source, float(weight)
    except ValueError:
        return text, None
