"""Perplexity and cloze accuracy of the model that an engine holds: batch by batch, alike on every rank.

Passages of a cloze test: in each document of a text, the model predicts the last word from the preceding words.

document   | The cat sat on the m a t . end |       the end token, and white space at the end, are no part of it
passage    | The cat sat on the m a t . |           too long for a window: its last tokens
scored                          s s s s             from the start of the last word
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from torch import Tensor

from passes.errors import PlanError
from runtime.data.tokens import WORD, Tokens
from runtime.engine import Engine
from runtime.evaluation.measures import Cloze, Perplexity
from runtime.evaluation.rows import RowBatches
from runtime.evaluation.windows import Row, Samples, Windows, windows_of

Progress = Callable[[int], None]  # called with the number of finished rows


@dataclass(frozen=True, slots=True)
class Original:
    """Number of original tokens, which normalizes perplexity, and its source."""

    number: int
    how: str


def original_of(tokens: Tokens, given: int | None = None) -> Original:
    """``given``, or the words of the text. Raises PlanError if it has none."""
    if given is not None:
        return Original(given, "original tokens, from the option")
    words = int(tokens.words.sum())
    if not words:
        raise PlanError(
            f"{tokens.source} has no words to normalize by",
            where="--data",
            fix="give a text, or the number of its original tokens with --original-tokens",
        )
    return Original(words, "labels" if tokens.is_supervised else "words of the text")


def perplexity(
    engine: Engine,
    tokens: Tokens,
    *,
    stride: int | None = None,
    original_tokens: int | None = None,
    progress: Progress = lambda num_rows: None,
) -> Perplexity:
    """exp(−(1/T_o) Σ log P) over windows of the spec's length; the same call on every rank, the same answer on each.

    ``stride``: tokens from one window to the next; 32, or the number of tokens that a window predicts, if less.
    ``original_tokens``: T_o; the text's words if not given. Raises PlanError if text or model have no such thing.
    """
    batches = RowBatches(engine.spec, engine.plan.to_run()[0].scored)
    original = original_of(tokens, original_tokens)
    windows = windows_of(tokens, batches.span, stride)
    sums, num_scored = list[float](), 0
    for log_probabilities, _ in _scored(engine, batches, windows, progress):
        sums.append(float(log_probabilities.sum()))
        num_scored += log_probabilities.numel()
    return Perplexity(
        math.fsum(sums),
        num_scored,
        windows.num_scored - num_scored,
        original.number,
        original.how,
        len(windows),
        batches.span,
        windows.stride,
    )


def cloze(engine: Engine, tokens: Tokens, *, progress: Progress = lambda num_rows: None) -> Cloze:
    """Share of documents in which every token of the last word is the arg max, given the true tokens before it.

    The same call on every rank, the same answer on each. Raises PlanError if no document is a passage.
    """
    batches = RowBatches(engine.spec, engine.plan.to_run()[0].scored)
    passages = passages_of(tokens, batches.span)
    num_right = sum(bool(is_top.all()) for _, is_top in _scored(engine, batches, passages, progress))
    return Cloze(num_right, len(passages), passages.num_cut, Counter(passages.left_out), batches.span)


def rows_of(tokens: Tokens, batches: RowBatches, *, is_cloze: bool, stride: int | None) -> Windows | Samples | Passages:
    """The rows to score. Raises PlanError if there are none."""
    if is_cloze:
        return passages_of(tokens, batches.span)
    return windows_of(tokens, batches.span, stride)


def _scored(
    engine: Engine, batches: RowBatches, rows: Iterable[Row], progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each row in its order: log P and top of the tokens that it is to score."""
    left = iter(rows)
    while some := list(islice(left, batches.size)):
        yield from batches.scores_of(some, engine.score(batches.batch(some)))
        progress(len(some))


# ---- passages of a cloze test: in each document of a text, the model predicts the last word from the preceding words


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
