"""Masked words and sentence order: the objective of BERT (Devlin et al. 2018; order: Lan et al. 2019).

    tokens          [class] the [mask] sat . [separator] it [mask] [mask] [separator] [padding] …
    labels           -100  -100  cat  -100 …              -100   slept  .   -100        -100
    segments          0      0    0     0  0     0         1       1    1     1           0
    attention_mask    1      1    1     1  1     1         1       1    1     1           0
    sentence_order   1 if the second run of sentences came first in the text, otherwise 0

The two segments are consecutive runs of sentences of one document, swapped with probability 1/2. A model that reads
neither segments nor an order gets one run of text, ``[class] text [separator]``. Each epoch has new masks, cuts, swaps.

The masked words of a sample and their replacements (Devlin et al. 2018; n-grams: Joshi et al. 2019):

    n-gram   1 .. ngram consecutive words, n drawn with probability ∝ 1/n, the first word uniformly
    until    ``share`` of the tokens is chosen; an n-gram that exceeds the rest is the last, and taken with probability
             rest / size: the share holds in expectation, and long words are chosen too
    word     80 % become the mask, 10 % random ids, 10 % stay

The replacement is drawn once for all tokens of a word: half a word next to its masked half would reveal it, most of
all with bytes as tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.random import Generator

from passes.errors import PlanError
from planner.spec.inputs import DataSpec
from runtime.data.objectives.samples import (
    ALL,
    NOTHING,
    Objective,
    Roles,
    Within,
    inner_sentences,
    plain_windows,
    sentence_windows,
)
from runtime.data.tokens import WORD, Tokens

NEEDED = ("class", "separator", "mask", "padding")
PAIRED_ROLES = frozenset({"segments", "sentence_order"})


def masked(tokens: Tokens, length: int, data: DataSpec, seed: int, roles: Roles, within: Within = ALL) -> Objective:
    """Return samples for a model that reads ``roles``: pairs if segments or sentence_order are among them.

    Raises PlanError if the tokens make none, or for several lengths.
    """
    if within != ALL:
        fix = "write one length under inputs, or call runtime.Engine with batches of your own"
        raise PlanError("objective: masked makes sequences of one length", where="data.objective", fix=fix)
    return MaskedWords(tokens, length, not PAIRED_ROLES.isdisjoint(roles), seed, data.mask.share, data.mask.ngram)


class MaskedWords:
    """Samples of ``length`` tokens with masked words. Owns the windows of the text; stateless.

    ``is_paired``: two runs of sentences, else one run of text. Raises PlanError if the tokenization lacks special ids,
    and for a text or a length too short for one sample.
    """

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        is_paired: bool,
        seed: int,
        share: float = 0.15,
        ngram: int = 3,
    ) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed
        self.share, self.ngram = share, ngram
        self.is_paired = is_paired
        special = tokens.tokenization.special
        _check(tokens, length, self._capacity)
        self._class, self._separator, self._mask, self._padding = (special[name] for name in NEEDED)
        self._ids, self._marks = np.asarray(tokens.ids), np.asarray(tokens.marks)  # slicing a memmap itself is slow
        self._random = RandomIds(tokens.tokenization.vocabulary_size, list(special.values()))
        self.windows = (sentence_windows if is_paired else plain_windows)(tokens, self._capacity)
        if not len(self.windows):
            what, fix = "the data contains no tokens", "give a longer text"
            if is_paired:
                what = "no document of the data has two sentences, which a pair needs"
                fix = "give a text with sentences, or a model without token_type_ids and sentence order"
            raise PlanError(what, where=tokens.source, fix=fix)

    @property
    def num_samples(self) -> int:
        """Number of samples in an epoch."""
        return len(self.windows)

    @property
    def _capacity(self) -> int:
        """Number of tokens of text in a sample."""
        return self.length - (3 if self.is_paired else 2)

    def sample(self, index: int, epoch: int) -> dict[str, np.ndarray]:
        """Return role → int64 [length]; pairs also have sentence_order: []."""
        draw = np.random.default_rng([self.seed, epoch, index])
        begin, stop = self.windows[index].tolist()
        first, second, is_swapped = self._runs(begin, stop, draw)
        text, bounds, segments = self._words([run for run in (first, second) if run is not None])
        chosen = choose_words(bounds, segments, self.share, self.ngram, draw)
        hidden = hide(text, bounds, chosen, self._mask, self._random, draw)
        labels = np.where(np.repeat(chosen, np.diff(bounds)), text, NOTHING)
        border = int(bounds[segments[1]]) if second is not None else len(text)
        roles = self._laid_out(hidden, labels, border)
        if self.is_paired:
            roles["sentence_order"] = np.array(int(is_swapped), dtype=np.int64)
        return roles

    def _runs(self, begin: int, stop: int, draw: Generator) -> tuple[slice, slice | None, bool]:
        """Return the one or two runs of text of a sample, in its order, and whether they are swapped."""
        if not self.is_paired:
            return slice(begin, stop), None, False
        inner = inner_sentences(self._marks, begin, stop)
        border = int(inner[draw.integers(len(inner))])
        before, after = _shortened(border - begin, stop - border, self._capacity)
        first, second = slice(border - before, border), slice(border, border + after)
        return (second, first, True) if draw.random() < 0.5 else (first, second, False)

    def _words(self, runs: list[slice]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Return the text of all runs (int64 [tokens]), the bounds of words [words + 1] and the first word of each run.

        The part of a word inside a window counts as a word.
        """
        texts, bounds, segments, at = [], [], [], 0
        for run in runs:
            begins = np.flatnonzero(self._marks[run.start + 1 : run.stop] & WORD) + 1
            segments.append(sum(map(len, bounds)))
            bounds.append(np.concatenate([np.zeros(1, dtype=np.int64), begins]) + at)
            texts.append(self._ids[run].astype(np.int64))
            at += len(texts[-1])
        return np.concatenate(texts), np.concatenate([*bounds, np.array([at])]), segments

    def _laid_out(self, text: np.ndarray, labels: np.ndarray, border: int) -> dict[str, np.ndarray]:
        """Return all roles, with special tokens and padding around the text. ``border``: tokens of the first run."""
        tokens = np.full(self.length, self._padding, dtype=np.int64)
        counted = np.full(self.length, NOTHING, dtype=np.int64)
        segments = np.zeros(self.length, dtype=np.int64)
        attention = np.zeros(self.length, dtype=np.int64)
        tokens[0], at = self._class, 1
        for number, part in enumerate((slice(0, border), slice(border, len(text)))[: 1 + self.is_paired]):
            stop = at + len(text[part])
            tokens[at:stop], counted[at:stop] = text[part], labels[part]
            tokens[stop] = self._separator
            segments[at : stop + 1] = number
            at = stop + 1
        attention[:at] = 1
        positions = np.arange(self.length, dtype=np.int64)
        return {
            "tokens": tokens,
            "labels": counted,
            "attention_mask": attention,
            "segments": segments,
            "positions": positions,
        }


def _shortened(before: int, after: int, most: int) -> tuple[int, int]:
    """Return the sizes of two runs shortened to ``most`` together: the longer run loses tokens first."""
    half = min(before, after, most // 2)
    return (half, min(after, most - half)) if before <= after else (min(before, most - half), half)


def _check(tokens: Tokens, length: int, capacity: int) -> None:
    special, name = tokens.tokenization.special, tokens.tokenization.name
    if missing := [what for what in NEEDED if what not in special]:
        raise PlanError(
            f"masked words need tokens that the tokenization {name} lacks: {', '.join(missing)}",
            where=tokens.source,
            fix="prepare the text with a tokenizer that has them, or as bytes; or set data.objective: next_token",
        )
    if len(set(special.values())) >= tokens.tokenization.vocabulary_size:
        fix = "prepare the text with a tokenizer that has other tokens too"
        raise PlanError(f"the tokenization {name} has only special tokens", where=tokens.source, fix=fix)
    if capacity < 2:
        raise PlanError(
            f"a sequence of {length} tokens is too short for special tokens and words",
            where="inputs",
            fix="use inputs of at least 5 tokens",
        )


MASKED, RANDOM = 0.8, 0.1  # the rest stays


def choose_words(bounds: np.ndarray, segments: Sequence[int], share: float, ngram: int, draw: Generator) -> np.ndarray:
    """Return whether each word is chosen, bool [words], at least one. ``bounds`` [words + 1]: word starts, and the end.

    ``segments``: the first word of each segment; no n-gram crosses into the next one.
    """
    num_words = len(bounds) - 1
    chosen = np.zeros(num_words, dtype=bool)
    budget = share * int(bounds[-1] - bounds[0])
    lengths = (1 + np.searchsorted(_up_to(ngram), draw.random(num_words), side="right")).tolist()
    stops = [*segments[1:], num_words]
    for first, length in zip(draw.permutation(num_words).tolist(), lengths, strict=True):
        stop = min(first + length, next(s for s in stops if s > first))
        if chosen[first:stop].any():
            continue
        size = int(bounds[stop] - bounds[first])
        if size > budget and draw.random() * size >= budget:
            break
        chosen[first:stop] = True
        budget -= size
        if budget <= 0:
            break
    if not chosen.any():  # a sample without labels would teach nothing
        chosen[draw.integers(num_words)] = True
    return chosen


def hide(
    text: np.ndarray, bounds: np.ndarray, chosen: np.ndarray, mask: int, others: RandomIds, draw: Generator
) -> np.ndarray:
    """Return ``text`` (int64 [tokens]) with the chosen words masked, replaced or kept. ``others``: random ids."""
    fate = draw.random(len(chosen))
    sizes = np.diff(bounds)
    masked = np.repeat(chosen & (fate < MASKED), sizes)
    replaced = np.repeat(chosen & (fate >= MASKED) & (fate < MASKED + RANDOM), sizes)
    hidden = np.where(masked, mask, text)
    if num_replaced := int(np.count_nonzero(replaced)):
        hidden[replaced] = others.drawn(num_replaced, draw)
    return hidden


@cache
def _up_to(ngram: int) -> np.ndarray:
    """Return the probability of at most 1 .. ngram - 1 words, if the probability of n words is ∝ 1/n."""
    shares = np.cumsum(1 / np.arange(1, ngram + 1))
    return shares[:-1] / shares[-1]


class RandomIds:
    """Uniformly distributed ids below ``vocabulary_size`` without the special ones."""

    def __init__(self, vocabulary_size: int, special: Sequence[int]) -> None:
        self.special = sorted({i for i in special if i < vocabulary_size})
        self.count = vocabulary_size - len(self.special)

    def drawn(self, size: int, draw: Generator) -> np.ndarray:
        """Return random ids, int64 [size]."""
        ids = draw.integers(self.count, size=size)
        for special in self.special:  # ascending: each moves the ids at or above it up by one
            ids += ids >= special
        return ids
