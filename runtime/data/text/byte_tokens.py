"""Text as bytes: token i is byte i, without a tokenizer or a download.

Special ids are control bytes that text does not hold: 0 ends a document and pads, 1 classifies, 26 masks, 28 separates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from passes.errors import PlanError
from runtime.data.text.pieces import Part, Piece
from runtime.data.tokens import SENTENCE, WORD, Tokenization

NUM_BYTES = 256
BYTES = Tokenization("bytes", NUM_BYTES, {"end": 0, "class": 1, "separator": 28, "mask": 26, "padding": 0})
_IS_SPACE = np.isin(np.arange(NUM_BYTES), list(b" \t\n\r\v\f"))
_IS_STOP = np.isin(np.arange(NUM_BYTES), list(b".!?"))
_NEWLINE = ord("\n")
_BEFORE_ALL = b". "  # a document begins with a sentence
_IS_SPECIAL = np.isin(np.arange(NUM_BYTES), list(BYTES.special.values()))


class ByteEncoder:
    """Bytes of documents, as they come. Owns the context that the next bytes need: at most two bytes.

    A word begins after white space; a sentence begins if a full stop, ``!`` or ``?`` stands before the white space,
    or a line ends within it.
    """

    tokenization = BYTES
    ends = (BYTES.special["end"],)

    def __init__(self) -> None:
        self._before = _BEFORE_ALL

    def pieces(self, parts: Iterable[Part]) -> Iterator[Piece]:
        for part in parts:
            check_is_text(part)
            yield self.encode(part.content, part.closes)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(text.encode())

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens: without special ones, and with a mark for bytes that are no UTF-8."""
        special = {*BYTES.special.values(), *(i for i in ids if i >= NUM_BYTES)}
        return bytes(i for i in ids if i not in special).decode(errors="replace")

    def encode(self, content: bytes, closes: bool = True) -> Piece:
        joined = np.frombuffer(self._before + content, np.uint8)
        skip = len(self._before)
        is_space = _IS_SPACE[joined]
        begins, ends = _borders(is_space)
        marks = np.zeros(len(joined), np.uint8)
        marks[begins] = WORD
        marks[begins[_after_stop(joined, is_space, begins, ends)]] |= SENTENCE
        self._before = _BEFORE_ALL if closes else _context(joined, is_space)
        return Piece(joined[skip:], marks[skip:], len(begins), closes)


def check_is_text(part: Part) -> None:
    """Raise PlanError for a byte that has another meaning here."""
    found = _IS_SPECIAL[np.frombuffer(part.content, np.uint8)]
    if found.any():
        at = int(found.argmax())
        raise PlanError(
            f"{part.file} contains the byte {part.content[at]}, which cannot occur in text",
            where=part.where(at),
            fix="give a text file, or a token file written by `meshwright prepare`",
        )


def _borders(is_space: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The begins of words after white space, and for each the last byte of the word before."""
    begins = np.flatnonzero(~is_space[1:] & is_space[:-1]) + 1
    ends = np.flatnonzero(is_space[1:] & ~is_space[:-1])
    return begins, ends[: len(begins)]  # the first byte is never white space: the two take turns


def _after_stop(text: np.ndarray, is_space: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Of each word that begins, whether a sentence begins with it (bool)."""
    breaks = _breaks(text, is_space)
    return _IS_STOP[text[ends]] | (np.searchsorted(breaks, ends) < np.searchsorted(breaks, begins))


def _breaks(text: np.ndarray, is_space: np.ndarray) -> np.ndarray:
    """The newlines that are followed by more white space: ends of paragraphs."""
    newlines = np.flatnonzero(text[:-1] == _NEWLINE)
    return newlines[is_space[newlines + 1]]


def _context(text: np.ndarray, is_space: np.ndarray) -> bytes:
    """The fewest bytes that have the same effect on the following text as all of ``text``."""
    if not is_space[-1]:
        return text[-1:].tobytes()
    last = int(np.flatnonzero(~is_space)[-1])
    is_stop = _IS_STOP[text[last]] or _breaks(text[last:], is_space[last:]).size
    return (b"." if is_stop else b"a") + text[-1:].tobytes()
