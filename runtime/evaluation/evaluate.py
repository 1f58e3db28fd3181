"""Perplexity and cloze accuracy of the model of an engine, batch by batch; every rank computes the same.

document   | The cat sat on the m a t . end |
passage    | The cat sat on the m a t . |           without the end token and trailing white space; if it is too long
                                                    for a window, its last tokens
scored                          s s s s             from the start of the last word

perplexity       exp(−(1/T_o) Σ log P(token))       T_o: words of the text before tokenization
cloze accuracy   share of passages in which every token of the last word is the arg max
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from passes.errors import PlanError
from runtime.data.tokens import WORD, Tokens
from runtime.engine.engine import Engine
from runtime.evaluation.rows import Row, RowBatches, windows_of

Progress = Callable[[int], None]  # called with the number of finished rows
SPACES = np.frombuffer(b" \t\n\r\v\f", np.uint8)
NO_WORD, ALONE, TOO_LONG = (
    "it has no marked word",
    "it has nothing before its last word",
    "its last word is longer than a window",
)


def original_of(tokens: Tokens, count: int | None = None) -> tuple[int, str]:
    """Return the number of original tokens, which normalizes perplexity, and its source in words.

    ``count``: from the option; default: the words of the text. Raises PlanError if the text has none.
    """
    if count is not None:
        return count, "original tokens, from the option"
    words = int(tokens.words.sum())
    if not words:
        fix = "give a text, or the number of its original tokens with --original-tokens"
        raise PlanError(f"{tokens.source} has no words to normalize by", where="--data", fix=fix)
    return words, "labels" if tokens.is_supervised else "words of the text"


def perplexity(
    engine: Engine,
    tokens: Tokens,
    *,
    stride: int | None = None,
    original_tokens: int | None = None,
    progress: Progress = lambda num_rows: None,
) -> Perplexity:
    """Return exp(−(1/T_o) Σ log P) over windows of the spec's length, on every rank; all ranks must call it.

    ``stride``: tokens from one window to the next; default: 32, but at most the tokens that a window predicts.
    ``original_tokens``: T_o; default: the words of the text. Raises PlanError for a text without words, or a model
    that does not predict next tokens.
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
        *original,
        len(windows),
        batches.span,
        windows.stride,
    )


def cloze(engine: Engine, tokens: Tokens, *, progress: Progress = lambda num_rows: None) -> Cloze:
    """Return the share of documents in which every token of the last word is the arg max, given all tokens before it.

    All ranks must call it, and get the same. Raises PlanError if no document is a passage.
    """
    batches = RowBatches(engine.spec, engine.plan.to_run()[0].scored)
    passages = passages_of(tokens, batches.span)
    num_right = sum(bool(is_top.all()) for _, is_top in _scored(engine, batches, passages.rows, progress))
    return Cloze(num_right, len(passages.rows), passages.num_cut, Counter(passages.left_out), batches.span)


def _scored(
    engine: Engine, batches: RowBatches, rows: Iterable[Row], progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (log P, whether it is the arg max) of the scored tokens of each row, in order."""
    left = iter(rows)
    while some := list(islice(left, batches.size)):
        yield from batches.scores_of(some, engine.score(batches.batch(some)))
        progress(len(some))


@dataclass(frozen=True, slots=True)
class Passages:
    """The passages to score. ``num_cut``: those with a truncated beginning; ``left_out``: reason → its documents."""

    rows: list[Row]
    num_cut: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def passages_of(tokens: Tokens, span: int) -> Passages:
    """Return a row for each document with a last word to predict. ``span``: tokens of a window.

    Raises PlanError if no document has one.
    """
    if tokens.is_supervised:
        what = f"{tokens.source} has samples with labels, not passages with a last word"
        raise PlanError(what, where="--cloze", fix="measure the perplexity of its labels: --perplexity")
    rows: list[Row] = []
    num_cut, left_out = 0, Counter[str]()
    start = 0
    for end in tokens.ends.tolist():
        passage = _row(tokens, start, _stop(tokens, start, end), span)
        if isinstance(passage, str):
            left_out[passage] += 1
        else:
            rows.append(passage[0])
            num_cut += passage[1]
        start = end
    if not rows:
        why = "; ".join(f"{number:,} documents: {reason}" for reason, number in left_out.items()) or "no document"
        fix = "make each passage a document: `meshwright prepare FILE -o PASSAGES --split-documents line`"
        raise PlanError(f"{tokens.source} has no passage with a last word to predict ({why})", where="--data", fix=fix)
    return Passages(rows, num_cut, left_out)


def _stop(tokens: Tokens, start: int, end: int) -> int:
    """Return the end of the text of a document, before its end token and trailing white space."""
    if end > start and int(tokens.ids[end - 1]) == tokens.tokenization.special.get("end"):
        end -= 1
    if tokens.tokenization.name == "bytes":
        kept = np.flatnonzero(~np.isin(tokens.ids[start:end], SPACES))
        end = start + int(kept[-1]) + 1 if len(kept) else start
    return end


def _row(tokens: Tokens, start: int, stop: int, span: int) -> tuple[Row, bool] | str:
    """Return the row, and whether its beginning was truncated; or the reason why there is none."""
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


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a text. ``log_probability``: sum over the ``num_scored`` tokens, in nats; ``num_ignored``:
    tokens that the loss ignores.

    ``num_original``: the divisor, tokens of the original text; ``counted``: how they were counted.
    """

    log_probability: float
    num_scored: int
    num_ignored: int
    num_original: int
    counted: str
    num_windows: int
    length: int
    stride: int

    @property
    def perplexity(self) -> float:
        return _exp(-self.log_probability / self.num_original)

    @property
    def of_tokens(self) -> float:
        """The perplexity per token of the model; not comparable between tokenizers."""
        return _exp(-self.log_probability / max(1, self.num_scored))

    def to_dict(self) -> dict[str, Any]:
        figures = {"perplexity": self.perplexity, "perplexity_of_tokens": self.of_tokens}
        return {k: v if math.isfinite(v) else None for k, v in figures.items()} | asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        ignored = f", beside {self.num_ignored:,} that the loss ignores" if self.num_ignored else ""
        return [
            ("perplexity", f"{self.perplexity:.6g}"),
            ("  over", f"{self.num_original:,} {self.counted}"),
            ("perplexity of its own tokens", f"{self.of_tokens:.6g}"),
            ("  over", f"{self.num_scored:,} tokens{ignored}"),
            ("sum of log P", f"{self.log_probability:.6f} nats"),
            ("windows", f"{self.num_windows:,} of {self.length} tokens, stride {self.stride}"),
        ]


@dataclass(frozen=True, slots=True)
class Cloze:
    """The cloze accuracy of a text. ``num_cut``: passages with a truncated beginning; ``left_out``: reason → number of
    documents."""

    num_right: int
    num_passages: int
    num_cut: int
    left_out: Mapping[str, int]
    length: int

    @property
    def accuracy(self) -> float:
        return self.num_right / self.num_passages

    def to_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, **asdict(self), "left_out": dict(self.left_out)}

    def rows(self) -> list[tuple[str, str]]:
        figures = [
            ("accuracy", f"{100 * self.accuracy:.2f} %"),
            ("passages", f"{self.num_passages:,}; the last word of {self.num_right:,} is right"),
            ("cut to a window", f"{self.num_cut:,}, to their last {self.length} tokens"),
        ]
        return [*figures, *(("left out", f"{number:,}: {reason}") for reason, number in self.left_out.items())]


def _exp(x: float) -> float:
    return math.exp(x) if x < math.log(float.fromhex("0x1.fffffffffffffp+1023")) else math.inf
