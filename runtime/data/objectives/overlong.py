"""Documents become pieces of at most a sequence: whole, cut, or left out (``data.overlong``).

text, cut      | a b c d | e f g |             one piece behind the other
sample, cut    | ^ … p q | A B C $ |           of samples with labels A B C $: context is cut away from the left, but
                 ^ p q A B C $                 for the token ^ that begins a text; then the end of the answer
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from passes.errors import PlanError
from runtime.data.objectives.protocol import ALL, Within
from runtime.data.tokens import LABEL, Tokens


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


def pieces_of(tokens: Tokens, length: int, overlong: str, within: Within = ALL) -> Pieces:
    """Of the documents with a size ``within``. Raises PlanError for one that is longer if ``overlong`` is refuse."""
    starts, sizes = within.of(tokens)
    is_long = sizes > length
    if not is_long.any():
        return _whole(tokens, starts, sizes)
    if overlong == "refuse":
        raise _refused(tokens, length)
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


def _refused(tokens: Tokens, length: int) -> PlanError:
    sizes = np.diff(tokens.ends, prepend=0)
    number = int(np.argmax(sizes > length))
    return PlanError(
        f"document {number} of {tokens.source} has {int(sizes[number])} tokens, a sequence {length}; "
        f"{int((sizes > length).sum())} of {len(sizes)} documents are longer",
        where="data.overlong",
        fix="set overlong: cut or drop, or use a longer inputs shape",
    )
