"""Small texts as tokens, made by hand: one id a byte, sentences end with a full stop, words with a space."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from runtime.data.tokens import SENTENCE, WORD, Tokenization, Tokens

SPECIAL = {"end": 0, "class": 1, "separator": 28, "mask": 26, "padding": 0}
STORY = "The cat sat down. It slept for an hour. Then it woke up hungry. Nobody had left any fish. So it went out."


def tokens_of(documents: Iterable[str], special: dict[str, int] | None = None) -> Tokens:
    """Each document with the end token behind it."""
    ids, marks, ends, words = [], [], [], []
    for text in documents:
        held = text.encode()
        ids += [*held, SPECIAL["end"]]
        marks += [*_marks(held), 0]
        ends.append(len(ids))
        words.append(len(text.split()))
    arrays = np.array(ids, np.uint16), np.array(ends, np.int64), np.array(marks, np.uint8), np.array(words, np.int64)
    tokenization = Tokenization("bytes", 256, SPECIAL if special is None else special)
    return Tokens(*arrays, tokenization, "a text", "by hand")


def _marks(text: bytes) -> list[int]:
    found, is_word, is_sentence = [], True, True
    for byte in text:
        here = byte != ord(" ")
        found.append(WORD * (here and is_word) | SENTENCE * (here and is_sentence))
        is_sentence = byte == ord(".") or (is_sentence and not here)
        is_word = not here
    return found
