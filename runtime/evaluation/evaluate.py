"""Perplexity and cloze accuracy of the model that an engine holds: batch by batch, alike on every rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from passes.errors import PlanError
from runtime.data.tokens import Tokens
from runtime.engine import Engine
from runtime.evaluation.measures import Cloze, Perplexity
from runtime.evaluation.passages import Passages, passages_of
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
