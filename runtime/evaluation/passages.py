"""Passages of a cloze test: in each document of a text, the model predicts the last word from the preceding words.

document   | The cat sat on the m a t . end |       the end token, and white space at the end, are no part of it
passage    | The cat sat on the m a t . |           too long for a window: its last tokens
scored                          s s s s             from the start of the last word
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from passes.errors import PlanError
from runtime.data.tokens import WORD, Tokens
from runtime.evaluation.windows import Row

SPACES = np.frombuffer(b" \t\n\r\v\f", np.uint8)
NO_WORD, ALONE, TOO_LONG = (
    "it has no marked word",
    "it has nothing before its last word",
    "its last word is longer than a window",
)


@dataclass(frozen=True, slots=True)
class Passages:
    """``num_cut``: of how many the beginning does not fit into a window. ``left_out``: reason → number of documents."""

    rows: list[Row]
    num_cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def passages_of(tokens: Tokens, span: int) -> Passages:
    """One row for each document that makes one; ``span``: tokens of a window.

    Raises PlanError if no document does.
    """
    if tokens.is_supervised:
        what = f"{tokens.source} has samples with labels, not passages with a last word"
        raise PlanError(what, where="--cloze", fix="measure the perplexity of its labels: --perplexity")
    rows: list[Row] = []
    num_cut, left_out = 0, Counter[str]()
    start = 0
    for end in tokens.ends.tolist():
        found = _row(tokens, start, _stop(tokens, start, end), span)
        if isinstance(found, str):
            left_out[found] += 1
        else:
            rows.append(found[0])
            num_cut += found[1]
        start = end
    if not rows:
        told = "; ".join(f"{number:,} documents: {reason}" for reason, number in left_out.items()) or "no document"
        raise PlanError(
            f"{tokens.source} has no passage with a last word to predict ({told})",
            where="--data",
            fix="make each passage a document: `meshwright prepare FILE -o PASSAGES --split-documents line`",
        )
    return Passages(rows, num_cut, left_out)


def _stop(tokens: Tokens, start: int, end: int) -> int:
    """The end of the text of a document."""
    if end > start and int(tokens.ids[end - 1]) == tokens.tokenization.special.get("end"):
        end -= 1
    if tokens.tokenization.name == "bytes":
        kept = np.flatnonzero(~np.isin(tokens.ids[start:end], SPACES))
        end = start + int(kept[-1]) + 1 if len(kept) else start
    return end


def _row(tokens: Tokens, start: int, stop: int, span: int) -> tuple[Row, bool] | str:
    """The row, and whether its beginning was cut; or why there is none."""
    words = np.flatnonzero(tokens.marks[start:stop] & WORD)
    if not len(words):
        return NO_WORD
    last = start + int(words[-1])
    if last == start:
        return ALONE
    begin = max(start, stop - span)
    if last <= begin:
        return TOO_LONG
    return Row(np.asarray(tokens.ids[begin:stop], np.int64), last - begin), begin > start
