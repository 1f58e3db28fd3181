"""Finds repetition in a sequence of operations: layers that are plain code in a loop leave no other trace.

The values of a captured graph that neither the batch nor the parameters alone give, in the order in which they are
computed, are a word; equal operations on equal shapes are equal letters. Layers are a stretch of it with some period p:

    token:  e  a n q s o a n u d a n q s o a n u d a n h      letter i = letter i + 9 from the first a to the last n
    live:   1  1 2 2 4 3 1 2 2 2 1 2 2 4 3 1 2 2 2 1 1        values that cross a cut before each letter

The start of a block within its period is free: it is the cut with the fewest bytes, mostly the residual alone.
Of periods that cover the same work the one with the cleanest cuts is taken, then the shortest (layers, not pairs of
layers). Candidates are the distances between equal windows of 1, 2, 4, 8, … letters, so the search is O(n log n).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# A period that covers this share of the best one's coverage is as good; a cut this much dearer is as clean.
_SHARE, _TOLERANCE = 0.9, 1.05
# Of a period's letters one in so many may differ in one place.
_GAP = 8
# The distances tried for each length of window, the most frequent ones first.
_NUM_DISTANCES = 12


@dataclass(frozen=True, slots=True)
class Flow:
    """n operations in order: ``tokens`` [n] ints, ``work`` [n], ``edges`` [m, 2] from producer to reader, ``live``
    [n + 1] bytes that cross a cut before each of them."""

    tokens: np.ndarray
    work: np.ndarray
    edges: np.ndarray
    live: np.ndarray


@dataclass(frozen=True, slots=True)
class BlockRun:
    """``count`` blocks of ``period`` operations each, one after the other from ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.period

    @property
    def cuts(self) -> range:
        """The positions between its blocks."""
        return range(self.start + self.period, self.end, self.period)


def live_bytes(edges: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Return the bytes of the values made before and read at or after each position, [n + 1]."""
    last = np.arange(len(num_bytes))
    np.maximum.at(last, edges[:, 0], edges[:, 1])
    change = np.zeros(len(num_bytes) + 2, dtype=np.int64)
    np.add.at(change, np.arange(len(num_bytes)) + 1, num_bytes)
    np.add.at(change, last + 1, -num_bytes)
    return np.cumsum(change)[:-1]


def find_runs(flow: Flow) -> list[list[BlockRun]]:
    """Return the repetitions in ``flow``, runs of one period together (the layers of two towers), heaviest first."""
    tokens, found = flow.tokens.copy(), []
    while runs := _best(flow, tokens):
        found.append(runs)
        for run in runs:
            tokens[run.start : run.end] = -1 - np.arange(run.start, run.end)  # equal to nothing any more
    return found


def _best(flow: Flow, tokens: np.ndarray) -> list[BlockRun]:
    total = np.concatenate(([0], np.cumsum(flow.work)))
    options = []
    for period in _periods(tokens):
        stretches = list(_stretches(flow, tokens, total, period))
        covered = sum(int(total[stop] - total[start]) for start, stop in stretches)
        options.append((covered, period, stretches))
    most = max((covered for covered, _, _ in options), default=0)
    large = [
        [_cleanest(flow, start, stop, period) for start, stop in stretches]
        for covered, period, stretches in options
        if covered and covered >= _SHARE * most
    ]
    crossing = [int(_median(np.concatenate([flow.live[run.cuts] for run in runs]))) for runs in large]
    return next((runs for runs, c in zip(large, crossing, strict=True) if c <= _TOLERANCE * min(crossing)), [])


def _periods(tokens: np.ndarray) -> list[int]:
    """Distances between neighbouring equal windows, of lengths that double: the true periods are among them."""
    periods: set[int] = set()
    window, length = np.unique(tokens, return_inverse=True)[1], 1
    while len(window) > 1:
        order = np.argsort(window, kind="stable")
        distance = np.diff(order)[np.diff(window[order]) == 0]
        if not len(distance):
            break
        values, counts = np.unique(distance, return_counts=True)
        periods.update(values[np.argsort(-counts, kind="stable")[:_NUM_DISTANCES]].tolist())
        pairs = window[:-length] * (len(tokens) + 1) + window[length:]
        window, length = np.unique(pairs, return_inverse=True)[1], 2 * length
    return sorted(periods)


def _stretches(flow: Flow, tokens: np.ndarray, total: np.ndarray, period: int) -> Iterator[tuple[int, int]]:
    """The ranges of at least two periods that do some work, one block after the other rather than side by side."""
    end = 0
    for first, last in _joined(tokens[:-period] == tokens[period:], period):
        start, stop = max(first, end), last + period
        taken = (tokens[start:stop] < 0).any()
        if stop - start >= 2 * period and total[start + period] > total[start] and not taken:
            block, count = (flow.edges - start) // period, (stop - start) // period
            follows = (block[:, 1] == block[:, 0] + 1) & (block[:, 0] >= 0) & (block[:, 1] < count)
            if 2 * len(np.unique(block[follows, 1])) > count - 1:  # most blocks read values of the block before them
                end = stop
                yield start, stop


def _joined(equal: np.ndarray, period: int) -> list[list[int]]:
    """The ranges of ``equal``, across short gaps too: a layer may differ in one place (and is a kind of its own)."""
    padded = np.concatenate(([False], equal, [False])).astype(np.int8)
    ranges: list[list[int]] = []
    for first, last in np.flatnonzero(np.diff(padded)).reshape(-1, 2).tolist():
        before, end = ranges[-1] if ranges else (0, 0)
        gap, sides = first - end, (end - before, last - first)
        if ranges and gap <= max(1, period // _GAP) and min(sides) >= gap and sum(sides) >= 6 * gap:
            ranges[-1][1] = last
        else:
            ranges.append([first, last])
    return ranges


def _cleanest(flow: Flow, start: int, stop: int, period: int) -> BlockRun:
    """Return the phase with the fewest bytes across its cuts; of those about equal the one with the most blocks."""
    most, spare = divmod(stop - start, period)
    options = []
    for count, phases in ((most, np.arange(spare + 1)), (most - 1, np.arange(spare + 1, period))):
        if count >= 2:
            cuts = start + phases + period * np.arange(1, count)[:, None]
            options += [
                (-count, int(c), start + int(phase)) for c, phase in zip(_median(flow.live[cuts]), phases, strict=True)
            ]
    limit = _TOLERANCE * min(crossing for _, crossing, _ in options)
    count, _, first = min(option for option in options if option[1] <= limit)
    return BlockRun(first, period, -count)


def _median(crossing: np.ndarray) -> np.ndarray:
    """Return the median over cuts of their bytes [cuts, …]: a value that passes a part of the blocks does not count."""
    return np.sort(crossing, axis=0)[len(crossing) // 2]
