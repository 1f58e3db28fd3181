"""Check before training that the ids of a text fit the model; an error names the file and the position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from planner.spec.sections import InputSpec
from runtime.data.roles import OF_IDS
from runtime.data.tokens import Tokens

_SCANNED = 1 << 22  # ids at once


def check_vocabulary(
    tokens: Tokens,
    inputs: Mapping[str, InputSpec],
    roles: Mapping[str, str],
    ranges: Mapping[str, Iterable[IdRange]],
) -> None:
    """Raise PlanError if an input takes fewer ids than the tokenization has.

    ``ranges``: the ids that the model looks up by an input, from its plan (``decisions.id_ranges``). A text with ids
    that are known to be small enough is not read: an objective may still ask for any id of the vocabulary.
    """
    for name, spec in inputs.items():
        if roles[name] not in OF_IDS:
            continue
        if spec.high is not None:
            _check(tokens, spec.high, f"inputs.{name}.high is {spec.high}", f"inputs.{name}.high")
        for ids in ranges.get(name, ()):
            _check(tokens, ids.high, f"{ids.what} has {ids.unit} 0 to {ids.high - 1}", f"inputs.{name}")


def _check(tokens: Tokens, high: int, what: str, where: str) -> None:
    how = tokens.tokenization
    if how.vocabulary_size <= high:
        return
    place = None if tokens.largest is not None and tokens.largest < high else _first_from(tokens.ids, high)
    if place is None:
        found = f"the tokenizer {how.name} has ids up to {how.vocabulary_size - 1}"
    else:
        found = f"{tokens.source} has the id {int(tokens.ids[place])} at position {place}"
    if how.name == "bytes":
        found += "; text as bytes has tokens up to 255"
    raise PlanError(
        f"{found}, but {what}",
        where=where,
        fix=f"use a model with a vocabulary of at least {how.vocabulary_size} (and its high), or another tokenizer",
    )


def _first_from(ids: np.ndarray, high: int) -> int | None:
    """The position of the first id that is ``high`` or more."""
    for at in range(0, len(ids), _SCANNED):
        found = ids[at : at + _SCANNED] >= high
        if found.any():
            return at + int(found.argmax())
    return None
