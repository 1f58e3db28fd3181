"""The interface of objectives: samples by number, as pure functions; pieces and windows of documents.

Documents become pieces of at most a sequence: whole, cut, or left out (``data.overlong``).

text, cut      | a b c d | e f g |             consecutive pieces
sample, cut    | ^ … p q | A B C $ |           with labels A B C $: first context is cut from the left, except the
                 ^ p q A B C $                 begin token ^; then the answer is cut from the right

A window of masked words lies inside one document: a run of sentences for pairs, otherwise any tokens.

    sentences   | a  | b | c   | d | e  |        windows of at most 12 tokens:  a b | c d | d e
    window      as many whole sentences as fit, at least two; the next window begins at its end

A single sentence that remains at the end of a document forms a window with the previous one, which then occurs twice.
A document of one sentence is left out: it has no pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from passes.errors import PlanError
from planner.spec.inputs import DataSpec
from runtime.data.tokens import LABEL, SENTENCE, Tokens

NOTHING = -100  # the label of a position that does not count: cross entropy's default ignore_index
NO_ROLES: Mapping[str, tuple[int, ...]] = {}
Roles = Mapping[str, tuple[int, ...]]  # role that the model reads → the shape of its input
_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of documents: ``starts``, ``sizes``, ``heads``, int64 [pieces].

    ``heads``: the place of a begin token that replaces the first tokens of a piece, -1 for none. ``told``: a line about
    documents that were cut or left out; empty if none was.
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
        """Return the ids of a piece (int64) and whether each is a label (bool), both [size]."""
        start, size, head = int(self.starts[number]), int(self.sizes[number]), int(self.heads[number])
        places = np.arange(start, start + size)
        if head >= 0:
            places = np.concatenate([[head], places[:-1]])
        ids = self.tokens.ids[places].astype(np.int64)
        is_label = (self.tokens.marks[places] & LABEL) != 0 if self.tokens.is_supervised else np.ones(size, bool)
        return ids, is_label


class Within(NamedTuple):
    """A range of document sizes: more than ``above`` tokens, and at most ``most`` (None: no limit)."""

    above: int = 0
    most: int | None = None

    def of(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Return starts and sizes, int64 [documents], of the documents in this range."""
        ends, sizes = np.asarray(tokens.ends), np.diff(tokens.ends, prepend=0)
        if self == ALL:
            return ends - sizes, sizes
        chosen = (sizes > self.above) & (sizes <= (sizes.max(initial=0) if self.most is None else self.most))
        return (ends - sizes)[chosen], sizes[chosen]


ALL = Within()


class Objective(Protocol):
    """Samples by number. ``num_samples``: of one epoch."""

    @property
    def num_samples(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        """Return role -> int64 [length], or [] for one number per sequence: a pure function of (seed, epoch, index).

        The roles are a subset of ``planner.spec.inputs.ROLES``.
        """
        ...


# (tokens, length, data section, seed, roles, sizes of documents); raises PlanError
Make = Callable[[Tokens, int, DataSpec, int, Roles, Within], Objective]


def pieces_of(tokens: Tokens, length: int, overlong: str, within: Within = ALL) -> Pieces:
    """Return pieces of at most ``length`` tokens, of the documents with a size ``within``.

    Raises PlanError for a longer document if ``overlong`` is refuse.
    """
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
    """Return consecutive windows of each document, each with the next token: at most ``length`` + 1 tokens."""
    starts, sizes = within.of(tokens)
    begins, sizes = _parts(starts, np.maximum(sizes - 1, 0), length)
    return _whole(tokens, begins, sizes + 1)


def counts_of(tokens: Tokens, length: int) -> str:
    """Return a line about the documents that ``overlong: cut`` would cut at this length."""
    return pieces_of(tokens, length, "cut").told or f"none of {len(tokens.ends):,} is longer than {length:,} tokens"


def _whole(tokens: Tokens, starts: np.ndarray, sizes: np.ndarray) -> Pieces:
    """Return each document as a piece; those of one token are left out: nothing is predicted in them."""
    starts, sizes = starts[sizes > 1], sizes[sizes > 1]
    return Pieces(tokens, starts, sizes, np.full(len(starts), -1))


def _parts(starts: np.ndarray, sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and sizes of consecutive pieces of at most ``length`` tokens."""
    counts = -(-sizes // length)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # index in the document
    begins = np.repeat(starts, counts) + number * length
    return begins, np.minimum(np.repeat(starts + sizes, counts) - begins, length)


def _cut_samples(tokens: Tokens, starts: np.ndarray, sizes: np.ndarray, length: int) -> Pieces:
    begin = tokens.tokenization.special.get("begin")
    begins, heads = starts.copy(), np.full(len(starts), -1)
    context = lost = 0
    for number in np.flatnonzero(sizes > length).tolist():
        start, size = int(starts[number]), int(sizes[number])
        labels = np.flatnonzero(tokens.marks[start : start + size] & LABEL)
        first = int(labels[0]) if len(labels) else size
        removed = max(0, min(size - length, first - 1))
        if removed and int(tokens.ids[start]) == begin:
            heads[number] = start
            begins[number] += 1  # the begin token stays: one more token is removed after it
        begins[number] += removed
        context += removed
        lost += int(np.count_nonzero(labels >= removed + length))
    kept = np.minimum(sizes, length)
    pieces = Pieces(tokens, begins, kept, heads)
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
    """Return begins and stops of runs of two or more sentences, in the order of the text: int64 [windows, 2].

    A window has at most ``most`` tokens, unless two sentences alone are longer. ``at_once``: number of tokens that are
    read at a time (more for a longer document): a text may be larger than memory.
    """
    heads, tails = documents(tokens)
    cuts = np.flatnonzero(np.diff(heads // at_once)) + 1
    groups = zip(np.split(heads, cuts), np.split(tails, cuts), strict=True) if len(heads) else ()
    windows = [np.stack(_runs(np.asarray(tokens.marks[h[0] : t[-1]]), h, t, most), 1) for h, t in groups]
    return np.concatenate([np.zeros((0, 2), dtype=np.int64), *windows])


def plain_windows(tokens: Tokens, most: int) -> np.ndarray:
    """Return begins and stops of consecutive windows of ``most`` tokens in each document: int64 [windows, 2]."""
    heads, tails = documents(tokens)
    begins, sizes = _parts(heads, tails - heads, most)
    return np.stack([begins, begins + sizes], 1)


def inner_sentences(marks: np.ndarray, begin: int, stop: int) -> np.ndarray:
    """Return the begins of the sentences of [begin, stop) except the first, int64 [sentences - 1]."""
    return np.flatnonzero(marks[begin + 1 : stop] & SENTENCE) + begin + 1


def documents(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """Return begins and stops of the documents that have tokens, without end tokens: both int64 [documents]."""
    stops = np.asarray(tokens.ends, dtype=np.int64)
    heads = np.concatenate([np.zeros(1, dtype=np.int64), stops])[:-1]
    filled = stops > heads
    heads, stops = heads[filled], stops[filled]
    end = tokens.tokenization.special.get("end")
    if end is not None and len(stops):
        stops = stops - (np.asarray(tokens.ids[stops - 1]) == end)
    return heads[stops > heads], stops[stops > heads]


def _runs(marks: np.ndarray, heads: np.ndarray, tails: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and stops of the windows of adjacent documents with these marks: both int64 [windows]."""
    starts = np.union1d(np.flatnonzero(marks & SENTENCE) + heads[0], heads)
    document = np.searchsorted(heads, starts, side="right") - 1
    is_inside = starts < tails[document]  # an end token may be marked too
    starts, document = starts[is_inside], document[is_inside]
    last = np.searchsorted(starts, tails[document])  # index of the first sentence after the document
    edges = np.append(starts, tails[-1])
    fitting = np.searchsorted(edges, starts + most, side="right") - 1
    stop = np.minimum(np.maximum(fitting, np.arange(len(starts)) + 2), last)
    stop = np.where(tails[document] - starts <= most, last, stop)  # the end token needs no room
    begins, stops = _walk(stop.tolist(), document.tolist())
    return starts[begins], np.where(stops == last[begins], tails[document[begins]], edges[stops])


def _walk(stop: list[int], document: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the first sentence of each window, and the sentence after its last one."""
    begins, stops, at = [], [], 0
    while at < len(stop):
        if stop[at] - at >= 2:
            begins.append(at)
            stops.append(stop[at])
        elif at and document[at - 1] == document[at]:  # a single sentence remains at the end of the document
            begins.append(at - 1)
            stops.append(stop[at])
        at = stop[at]
    return np.array(begins, dtype=np.int64), np.array(stops, dtype=np.int64)
