"""The texts of a run and the share of each.

--data a.tokens=0.7 --data b.tokens=0.3
data: {mixture: {a.tokens: 0.7, b.tokens: 0.3}}      of the spec, without --data
"""

from __future__ import annotations

import math
from pathlib import Path

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.data.text.sources import STDLIB


def read_mixture(given: list[str]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The one text without a share, or the first of several and all of them with theirs.

    Raises PlanError if a share is missing, or no positive number.
    """
    parts = [_part(text) for text in given]
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0], ()
    found = []
    for source, weight in parts:
        if weight is None or not 0 < weight < math.inf:
            what = f"--data {source} has no share" if weight is None else f"--data {source}: {weight:g} is not a share"
            raise PlanError(what, where="--data", fix="write --data PATH=SHARE for each text: --data a.txt=0.7")
        found.append((source, weight))
    return found[0][0], tuple(found)


def mixture_of_spec(path: str) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The same, of the spec at ``path``: paths are relative to the working directory, or to the spec's.

    Raises PlanError if the spec names no text, or one that is not there.
    """
    spec = Spec.load(path)
    shares = spec.data.mixture
    if not shares:
        fix = "add --data PATH, or `data: {mixture: {PATH: 1}}` to the spec"
        raise PlanError("no text to train on", where="--data", fix=fix)
    found = tuple((_place_of(source, spec, path), share) for source, share in shares.items())
    return found[0][0], found


def _place_of(source: str, spec: Spec, path: str) -> str:
    beside = Path(path).parent / source
    if source == STDLIB or Path(source).exists():
        return source
    if not beside.exists():
        raise PlanError(
            f"data.mixture: no file or directory {source}",
            where=spec.location("data.mixture"),
            fix="name a token file, a text file or a directory, relative to the working directory or to the spec's",
        )
    return str(beside)


def _part(text: str) -> tuple[str, float | None]:
    source, equals, weight = text.rpartition("=")
    if not equals or Path(text).exists():
        return text, None
    try:
        return source, float(weight)
    except ValueError:
        return text, None


def named_files(given: list[str]) -> tuple[tuple[str, str], ...]:
    """``NAME=FILE`` of ``--validation-data``. Raises PlanError for another form, or a name twice."""
    found = [(name, file) for name, _, file in (text.partition("=") for text in given)]
    for place, (name, file) in enumerate(found):
        if not (name and file) or name in [other for other, _ in found[:place]]:
            what = f"--validation-data {given[place]}: " + ("a name comes twice" if file else "no NAME=FILE")
            raise PlanError(what, where="--validation-data", fix="write --validation-data NAME=FILE, each name once")
    return tuple(found)
