"""Hold out the end of a text for validation, which training never reads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from passes.errors import PlanError
from runtime.data.tokens import ROW, WORD, Tokens

_COUNTED = 1 << 22  # marks at once


def split(tokens: Tokens, share: float) -> tuple[Tokens, Tokens | None]:
    """The training text, and the last ``share`` of the text: whole documents, at least one; None if share is 0.

    The text is split at the nearest end of a document. A text of one document is split inside it. Samples with labels
    are split between rows. Raises PlanError for one row of them.
    """
    if not share:
        return tokens, None
    first, second = _cut(tokens, round((1.0 - share) * len(tokens.ids)))
    parts = f"{tokens.source} without its held-out part", f"the held-out part of {tokens.source}"
    return replace(first, source=parts[0]), replace(second, source=parts[1])


def _cut(tokens: Tokens, wanted: int) -> tuple[Tokens, Tokens]:
    if len(tokens.ends) == 1 and not tokens.is_supervised:
        return _inside(tokens, wanted)
    inner, documents = np.asarray(tokens.ends[:-1]), np.arange(len(tokens.ends) - 1)
    if tokens.is_supervised:  # a row may be several samples, which hold the same text
        documents = documents[(tokens.marks[inner] & ROW) != 0]
        if not len(documents):
            what = f"{tokens.source} has one row, of which no part can be held out"
            raise PlanError(what, where="data.validation", fix="give more rows, or set validation: 0")
        inner = inner[documents]
    after = min(int(np.searchsorted(inner, wanted)), len(inner) - 1)
    before = max(after - 1, 0)
    last = int(documents[min((before, after), key=lambda d: abs(int(inner[d]) - wanted))])
    return _part(tokens, 0, last + 1), _part(tokens, last + 1, len(tokens.ends))


def _part(tokens: Tokens, first: int, stop: int) -> Tokens:
    """The documents ``first`` to ``stop``."""
    begin, end = int(tokens.ends[first - 1]) if first else 0, int(tokens.ends[stop - 1])
    return replace(
        tokens,
        ids=tokens.ids[begin:end],
        marks=tokens.marks[begin:end],
        ends=tokens.ends[first:stop] - begin if begin else tokens.ends[first:stop],
        words=tokens.words[first:stop],
        identity=f"{tokens.identity} [{begin}:{end}]",
    )


def _inside(tokens: Tokens, place: int) -> tuple[Tokens, Tokens]:
    """The two parts of a text that is one document."""
    in_end = sum(
        int(np.count_nonzero(tokens.marks[at : at + _COUNTED] & WORD))
        for at in range(place, len(tokens.marks), _COUNTED)
    )
    words = int(tokens.words[0]) - in_end, in_end
    parts = (0, place), (place, len(tokens.ids))
    first, second = (
        replace(
            tokens,
            ids=tokens.ids[begin:end],
            marks=tokens.marks[begin:end],
            ends=np.array([end - begin]),
            words=np.array([num_words]),
            identity=f"{tokens.identity} [{begin}:{end}]",
        )
        for (begin, end), num_words in zip(parts, words, strict=True)
    )
    return first, second
