"""Which tokens a sample is made of: runs of sentences for pairs, plain windows otherwise; always of one document.

    sentences   | a  | b | c   | d | e  |        windows of at most 12 tokens:  a b | c d | d e
    window      a run of whole sentences as long as fits, two at least; the next one begins at its end

A sentence that is left alone at the end of a document takes the one before it along once more. Of a document of one
sentence there is no pair: it is left out. Plain windows lie end to end in each document, the last is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.data.tokens import SENTENCE, Tokens

_AT_ONCE = 1 << 24


class Windows(Protocol):
    """An ordered set of windows of a text."""

    def __len__(self) -> int: ...

    def span(self, index: int) -> tuple[int, int]:
        """The tokens [begin, stop) of a window."""
        ...


@dataclass(frozen=True, slots=True)
class SentenceWindows:
    """Runs of two sentences or more. ``begins`` and ``stops`` (int64): [windows]. Longer than asked only if two
    sentences alone are too long.
    """

    begins: np.ndarray
    stops: np.ndarray

    @classmethod
    def of(cls, tokens: Tokens, most: int, at_once: int = _AT_ONCE) -> SentenceWindows:
        """Windows of at most ``most`` tokens.

        ``at_once``: tokens looked at together, more in a longer document; a text may be larger than the memory.
        """
        heads, tails = documents(tokens)
        cuts = np.flatnonzero(np.diff(heads // at_once)) + 1
        groups = zip(np.split(heads, cuts), np.split(tails, cuts), strict=True) if len(heads) else ()
        found = [_runs(np.asarray(tokens.marks[h[0] : t[-1]]), h, t, most) for h, t in groups]
        nothing = np.zeros(0, dtype=np.int64)
        begins, stops = (np.concatenate([nothing, *parts]) for parts in zip((nothing, nothing), *found, strict=True))
        return cls(begins, stops)

    def __len__(self) -> int:
        return len(self.begins)

    def span(self, index: int) -> tuple[int, int]:
        return int(self.begins[index]), int(self.stops[index])


def inner_sentences(marks: np.ndarray, begin: int, stop: int) -> np.ndarray:
    """The begins of the sentences of [begin, stop) after the first, int64 [sentences - 1]."""
    return np.flatnonzero(marks[begin + 1 : stop] & SENTENCE) + begin + 1


@dataclass(frozen=True, slots=True)
class PlainWindows:
    """Windows of ``most`` tokens, end to end in each document. Arrays are int64 [documents with tokens].

    ``counts``: windows up to and with each document.
    """

    heads: np.ndarray
    tails: np.ndarray
    counts: np.ndarray
    most: int

    @classmethod
    def of(cls, tokens: Tokens, most: int) -> PlainWindows:
        heads, tails = documents(tokens)
        return cls(heads, tails, np.cumsum(-(-(tails - heads) // most)), most)

    def __len__(self) -> int:
        return int(self.counts[-1]) if len(self.counts) else 0

    def span(self, index: int) -> tuple[int, int]:
        document = int(np.searchsorted(self.counts, index, side="right"))
        before = int(self.counts[document - 1]) if document else 0
        begin = int(self.heads[document]) + (index - before) * self.most
        return begin, min(begin + self.most, int(self.tails[document]))


def documents(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """The begins and stops of the documents that have tokens, without end tokens; both int64 [documents]."""
    stops = np.asarray(tokens.ends, dtype=np.int64)
    heads = np.concatenate([np.zeros(1, dtype=np.int64), stops])[:-1]
    filled = stops > heads
    heads, stops = heads[filled], stops[filled]
    end = tokens.tokenization.special.get("end")
    if end is not None and len(stops):
        stops = stops - (np.asarray(tokens.ids[stops - 1]) == end)
    return heads[stops > heads], stops[stops > heads]


def _runs(marks: np.ndarray, heads: np.ndarray, tails: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of the windows of adjacent documents with these marks; int64 [windows] each."""
    starts = np.union1d(np.flatnonzero(marks & SENTENCE) + heads[0], heads)
    document = np.searchsorted(heads, starts, side="right") - 1
    is_inside = starts < tails[document]  # an end token may be marked too
    starts, document = starts[is_inside], document[is_inside]
    last = np.searchsorted(starts, tails[document])  # the number of the first sentence behind the document
    edges = np.append(starts, tails[-1])
    fitting = np.searchsorted(edges, starts + most, side="right") - 1
    stop = np.minimum(np.maximum(fitting, np.arange(len(starts)) + 2), last)
    stop = np.where(tails[document] - starts <= most, last, stop)  # the end token needs no room
    begins, stops = _walk(stop.tolist(), document.tolist())
    return starts[begins], np.where(stops == last[begins], tails[document[begins]], edges[stops])


def _walk(stop: list[int], document: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """First sentence of each window, and the one behind its last: from window to window through the text."""
    begins, stops, at = [], [], 0
    while at < len(stop):
        if stop[at] - at >= 2:
            begins.append(at)
            stops.append(stop[at])
        elif at and document[at - 1] == document[at]:  # alone at the end
            begins.append(at - 1)
            stops.append(stop[at])
        at = stop[at]
    return np.array(begins, dtype=np.int64), np.array(stops, dtype=np.int64)
