"""Text as bytes: token i is byte i, without a tokenizer or a download.

Special ids are control bytes that text does not hold: 0 ends a document and pads, 1 classifies, 26 masks, 28 separates.
"""

from __future__ import annotations

import numpy as np

from runtime.data.text.pieces import Piece
from runtime.data.tokens import SENTENCE, WORD, Tokenization

NUM_BYTES = 256
BYTES = Tokenization("bytes", NUM_BYTES, {"end": 0, "class": 1, "separator": 28, "mask": 26, "padding": 0})
_IS_SPACE = np.isin(np.arange(NUM_BYTES), list(b" \t\n\r\v\f"))
_IS_STOP = np.isin(np.arange(NUM_BYTES), list(b".!?"))
_NEWLINE = ord("\n")
_BEFORE_ALL = b". "  # a document begins with a sentence


class ByteEncoder:
    """Bytes of one document, as they come. Owns what the next ones need of those before: at most two bytes.

    A word begins after white space; a sentence begins where a full stop, ``!`` or ``?`` stands before the white space,
    or a line ends within it.
    """

    def __init__(self) -> None:
        self._before = _BEFORE_ALL

    def encode(self, content: bytes) -> Piece:
        joined = np.frombuffer(self._before + content, np.uint8)
        skip = len(self._before)
        is_space = _IS_SPACE[joined]
        begins = np.flatnonzero(~is_space[1:] & is_space[:-1]) + 1
        marks = np.zeros(len(joined), np.uint8)
        marks[begins] = WORD
        marks[begins[_after_stop(joined, is_space, begins)]] |= SENTENCE
        self._before = _context(joined, is_space)
        return Piece(joined[skip:], marks[skip:], len(begins))


def _after_stop(text: np.ndarray, is_space: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Of each word that begins, whether a sentence begins with it (bool)."""
    last = np.maximum.accumulate(np.where(is_space, -1, np.arange(len(text))))[begins - 1]
    breaks = np.zeros(len(text) + 1, np.int64)
    np.cumsum(_is_break(text, is_space), out=breaks[1:])
    return ((last >= 0) & _IS_STOP[text[last]]) | (breaks[begins] > breaks[last + 1])


def _is_break(text: np.ndarray, is_space: np.ndarray) -> np.ndarray:
    """A newline that more white space follows: a paragraph ends."""
    found = text == _NEWLINE
    found[:-1] &= is_space[1:]
    found[-1:] = False
    return found


def _context(text: np.ndarray, is_space: np.ndarray) -> bytes:
    """As few bytes as say the same about what follows as all of ``text``."""
    if not is_space[-1]:
        return text[-1:].tobytes()
    words = np.flatnonzero(~is_space)
    last = int(words[-1]) if len(words) else -1
    is_stop = (last >= 0 and _IS_STOP[text[last]]) or _is_break(text, is_space)[last + 1 :].any()
    return (b"." if is_stop else b"a") + text[-1:].tobytes()
