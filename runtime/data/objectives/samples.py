"""Samples by number, the interface of objectives; a sample with one number is always the same.

Documents become pieces of at most a sequence: whole, cut, or left out (``data.overlong``).

text, cut      | a b c d | e f g |             one piece behind the other
sample, cut    | ^ … p q | A B C $ |           of samples with labels A B C $: context is cut away from the left, but
                 ^ p q A B C $                 for the token ^ that begins a text; then the end of the answer

A sample is a run of sentences for pairs, a plain window otherwise; always of one document:

    sentences   | a  | b | c   | d | e  |        windows of at most 12 tokens:  a b | c d | d e
    window      a run of whole sentences as long as fits, two at least; the next one begins at its end

A sentence that is left alone at the end of a document takes the one before it along once more. A document of one
sentence is left out: there is no pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from passes.errors import PlanError
from planner.spec.inputs import DataSpec
from runtime.data.tokens import LABEL, SENTENCE, Tokens

NOTHING = -100  # the label of a position that does not count: cross entropy ignores it by default
NO_ROLES: Mapping[str, tuple[int, ...]] = {}
Roles = Mapping[str, tuple[int, ...]]  # that the model reads → the shape of its input
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Pieces:
    """``starts``, ``sizes``: int64 [pieces]. ``heads``: where the token stands that comes before a piece's other
    tokens, -1 for none. ``told``: what was cut or left out; empty if nothing was.
    """

    tokens: Tokens
    starts: np.ndarray
    sizes: np.ndarray
    heads: np.ndarray
    told: str = ""

    def __len__(self) -> int:
        return len(self.starts)

    def taken(self, order: np.ndarray) -> Pieces:
        return replace(self, starts=self.starts[order], sizes=self.sizes[order], heads=self.heads[order])

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """``ids`` (int64) and whether each is a label (bool)."""
        start, size, head = int(self.starts[number]), int(self.sizes[number]), int(self.heads[number])
        places = np.arange(start, start + size)
        if head >= 0:
            places = np.concatenate([[head], places[:-1]])
        ids = self.tokens.ids[places].astype(np.int64)
        is_label = (self.tokens.marks[places] & LABEL) != 0 if self.tokens.is_supervised else np.ones(size, bool)
        return ids, is_label


class Within(NamedTuple):
    """Sizes of documents: more than ``above`` tokens, and at most ``most`` of them (None: any number)."""

    above: int = 0
    most: int | None = None

    def of(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Starts and sizes (int64 [documents]) of those documents."""
        ends, sizes = np.asarray(tokens.ends), np.diff(tokens.ends, prepend=0)
        if self == ALL:
            return ends - sizes, sizes
        chosen = (sizes > self.above) & (sizes <= (sizes.max(initial=0) if self.most is None else self.most))
        return (ends - sizes)[chosen], sizes[chosen]


ALL = Within()


class Objective(Protocol):
    """``num_samples``: of one epoch."""

    @property
    def num_samples(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        """Role -> int64 [length], or [] for one number a sequence: a pure function of (seed, epoch, index).

        The roles are those of ``planner.spec.inputs.ROLES``; an objective gives the ones that it has.
        """
        ...


# of tokens, length, section, seed, roles, and sizes of documents; raises PlanError
Make = Callable[[Tokens, int, DataSpec, int, Roles, Within], Objective]


def pieces_of(tokens: Tokens, length: int, overlong: str, within: Within = ALL) -> Pieces:
    """Of the documents with a size ``within``. Raises PlanError for one that is longer if ``overlong`` is refuse."""
    starts, sizes = within.of(tokens)
    is_long = sizes > length
    if not is_long.any():
        return _whole(tokens, starts, sizes)
    if overlong == "refuse":
        number = int(np.argmax(is_long))
        raise PlanError(
            f"document {number} of {tokens.source} has {int(sizes[number])} tokens, a sequence {length}; "
            f"{int(is_long.sum())} of {len(sizes)} documents are longer",
            where="data.overlong",
            fix="set overlong: cut or drop, or use a longer inputs shape",
        )
    kept = _whole(tokens, starts[~is_long], sizes[~is_long])
    if overlong == "drop":
        return replace(kept, told=f"{_long(tokens, sizes, length)}: left out")
    if tokens.is_supervised:
        return _cut_samples(tokens, starts, sizes, length)
    return replace(_whole(tokens, *_parts(starts, sizes, length)), told=f"{_long(tokens, sizes, length)}: cut apart")


def windows_of(tokens: Tokens, length: int, within: Within = ALL) -> Pieces:
    """Windows that lie end to end in each document, each with the token behind it: at most ``length`` + 1 tokens."""
    starts, sizes = within.of(tokens)
    begins, sizes = _parts(starts, np.maximum(sizes - 1, 0), length)
    return _whole(tokens, begins, sizes + 1)


def counts_of(tokens: Tokens, length: int) -> str:
    """What ``overlong: cut`` would do at this length."""
    return pieces_of(tokens, length, "cut").told or f"none of {len(tokens.ends):,} is longer than {length:,} tokens"


def _whole(tokens: Tokens, starts: np.ndarray, sizes: np.ndarray) -> Pieces:
    """A document of one token asks for nothing."""
    starts, sizes = starts[sizes > 1], sizes[sizes > 1]
    return Pieces(tokens, starts, sizes, np.full(len(starts), -1))


def _parts(starts: np.ndarray, sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and sizes of pieces of at most ``length`` tokens."""
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
    begins = np.repeat(starts, counts) + number * length
    return begins, np.minimum(np.repeat(starts + sizes, counts) - begins, length)


def _cut_samples(tokens: Tokens, starts: np.ndarray, sizes: np.ndarray, length: int) -> Pieces:
    begin = tokens.tokenization.special.get("begin")
    found, heads = starts.copy(), np.full(len(starts), -1)
    context = lost = 0
    for number in np.flatnonzero(sizes > length).tolist():
        start, size = int(starts[number]), int(sizes[number])
        labels = np.flatnonzero(tokens.marks[start : start + size] & LABEL)
        first = int(labels[0]) if len(labels) else size
        removed = max(0, min(size - length, first - 1))
        if removed and int(tokens.ids[start]) == begin:
            heads[number] = start
            found[number] += 1  # of the context behind the begin token, the left is cut away
        found[number] += removed
        context += removed
        lost += int(np.count_nonzero(labels >= removed + length))
    kept = np.minimum(sizes, length)
    pieces = Pieces(tokens, found, kept, heads)
    is_used = np.array([n <= length or pieces.of(i)[1][1:].any() for i, n in enumerate(sizes.tolist())], bool)
    told = f"{_long(tokens, sizes, length)}: {context:,} tokens of context cut away, {lost:,} labels"
    if not is_used.all():
        told += f"; {int((~is_used).sum()):,} have no label then and are left out"
    return replace(pieces.taken(np.flatnonzero(is_used)), told=told)


def _long(tokens: Tokens, sizes: np.ndarray, length: int) -> str:
    what = "samples" if tokens.is_supervised else "documents"
    return (
        f"{tokens.source}: {int((sizes > length).sum()):,} of {len(sizes):,} {what} are longer than {length:,} tokens"
    )


def sentence_windows(tokens: Tokens, most: int, at_once: int = _AT_ONCE) -> np.ndarray:
    """Runs of two sentences or more, of at most ``most`` tokens; longer only if two sentences alone are too long.
    Their begins and stops, in the order of the text: int64 [windows, 2].

    ``at_once``: tokens looked at together, more in a longer document; a text may be larger than the memory.
    """
    heads, tails = documents(tokens)
    cuts = np.flatnonzero(np.diff(heads // at_once)) + 1
    groups = zip(np.split(heads, cuts), np.split(tails, cuts), strict=True) if len(heads) else ()
    found = [_runs(np.asarray(tokens.marks[h[0] : t[-1]]), h, t, most) for h, t in groups]
    return np.concatenate([np.zeros((0, 2), dtype=np.int64), *(np.stack(runs, 1) for runs in found)])


def plain_windows(tokens: Tokens, most: int) -> np.ndarray:
    """Windows of ``most`` tokens, end to end in each document; int64 [windows, 2], their begins and stops."""
    heads, tails = documents(tokens)
    begins, sizes = _parts(heads, tails - heads, most)
    return np.stack([begins, begins + sizes], 1)


def inner_sentences(marks: np.ndarray, begin: int, stop: int) -> np.ndarray:
    """The begins of the sentences of [begin, stop) after the first, int64 [sentences - 1]."""
    return np.flatnonzero(marks[begin + 1 : stop] & SENTENCE) + begin + 1


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
