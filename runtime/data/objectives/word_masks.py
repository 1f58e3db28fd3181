"""Choose the masked words of a sample and their replacements (Devlin et al. 2018; n-grams: Joshi et al. 2019).

    n-gram   1 .. ngram words in a row, n drawn with probability ∝ 1/n, its first word uniformly
    until    ``share`` of the tokens is chosen; the n-gram that does not fit whole is taken with the probability of the
             part that fits, and is the last: so the share holds on average, and long words are chosen too
    word     80 % become the mask, 10 % random ids, 10 % stay

The replacement is drawn once for all tokens of a word: half a word next to its masked half would reveal it, most of
all with bytes as tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.random import Generator

MASKED, RANDOM = 0.8, 0.1  # the rest stays


def choose_words(bounds: np.ndarray, segments: Sequence[int], share: float, ngram: int, draw: Generator) -> np.ndarray:
    """The chosen words, bool [words], at least one. ``bounds`` [words + 1]: the begin of each word, and the end.

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
    """``text`` (int64 [tokens]) with its chosen words replaced; some of them stay readable."""
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
    """The probability of at most 1 .. ngram - 1 words, if the probability of n words is ∝ 1/n."""
    shares = np.cumsum(1 / np.arange(1, ngram + 1))
    return shares[:-1] / shares[-1]


class RandomIds:
    """Ids below ``vocabulary_size`` without the special ones, each as likely."""

    def __init__(self, vocabulary_size: int, special: Sequence[int]) -> None:
        self.special = sorted({i for i in special if i < vocabulary_size})
        self.count = vocabulary_size - len(self.special)

    def drawn(self, size: int, draw: Generator) -> np.ndarray:
        """int64 [size]."""
        ids = draw.integers(self.count, size=size)
        for special in self.special:  # ascending: each moves the ids at or above it up by one
            ids += ids >= special
        return ids
