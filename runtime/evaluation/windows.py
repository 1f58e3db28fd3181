"""Sliding windows over a text: each token but the first is scored once, behind as much of the text as a window holds.

window 0   | . s s s s s |                      the first: all that have a token before them
window 1       | . . . . s s |                  moved by the stride: its last tokens alone
window 2         | . . . . . s |                the last is moved back to end with the text
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from passes.errors import PlanError
from runtime.data.objectives.overlong import pieces_of
from runtime.data.tokens import Tokens

STRIDE = 32  # of the paper


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a batch: ``ids`` (int64 [tokens]); those from ``first`` on are scored, of ``is_label`` (bool
    [tokens]) if given."""

    ids: np.ndarray
    first: int
    is_label: np.ndarray | None = None


class Windows:
    """Windows of ``span`` tokens over ``ids`` [tokens], each ``stride`` further; 32 if not given, or the number of
    tokens that a window predicts, if less. ``num_scored``: tokens scored in all.

    Raises PlanError for a text of fewer than two tokens, and for a stride that would leave tokens out.
    """

    def __init__(self, ids: np.ndarray, span: int, stride: int | None, source: str) -> None:
        stride = min(STRIDE, span - 1) if stride is None else stride
        if len(ids) < 2:
            what = f"{source} holds {len(ids)} tokens, too few to predict one"
            raise PlanError(what, where="--data", fix="give a longer text")
        if not 1 <= stride < span:
            what = f"a window predicts {span - 1} tokens, a stride of {stride} would skip some"
            raise PlanError(what, where="--stride", fix=f"use --stride 1 to {span - 1}")
        self.ids, self.span, self.stride = ids, span, stride
        self.num_scored = len(ids) - 1

    def __len__(self) -> int:
        return 1 + max(0, -(-(len(self.ids) - self.span) // self.stride))

    def __iter__(self) -> Iterator[Row]:
        return (self.row(index) for index in range(len(self)))

    def row(self, index: int) -> Row:
        stop = min(self.span + index * self.stride, len(self.ids))
        start = max(0, stop - self.span)
        scored = 1 if index == 0 else self.span + (index - 1) * self.stride
        return Row(np.asarray(self.ids[start:stop], np.int64), scored - start)


class Samples:
    """One row a sample, of which the labels are scored; a longer one than ``span`` tokens is cut as in training.

    Raises PlanError for a stride: samples are no windows.
    """

    def __init__(self, tokens: Tokens, span: int, stride: int | None) -> None:
        if stride is not None:
            what = f"{tokens.source} has samples with labels, which have no stride"
            raise PlanError(what, where="--stride", fix="remove --stride")
        self._pieces, self.stride = pieces_of(tokens, span, "cut"), 0
        self.num_scored = sum(int(row.is_label[1:].sum()) for row in self if row.is_label is not None)

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[Row]:
        return (Row(ids, 1, is_label) for ids, is_label in map(self._pieces.of, range(len(self))))


def windows_of(tokens: Tokens, span: int, stride: int | None) -> Windows | Samples:
    """The rows to score for perplexity. Raises PlanError if there are none."""
    if tokens.is_supervised:
        return Samples(tokens, span, stride)
    return Windows(tokens.ids, span, stride, tokens.source)
