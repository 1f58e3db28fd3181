"""A text as token ids, with the ends of documents and the starts of words and sentences, for batches and scores.

ids      | 17 4 98 3 0 | 52 7 7 0 |        one after another
ends               5          9            the end of each document, including its end token
marks      s w   w       s   w             bits: a word begins here, a sentence begins here; of samples with
                                           labels instead: this token is a label, a row begins here
words          3           2               of the text before it was cut into tokens
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

WORD, SENTENCE, LABEL, ROW = 1, 2, 4, 8  # bits of a mark
PAIRS = "pairs"  # the key of their two fields in a token file


@dataclass(frozen=True, slots=True)
class Tokenization:
    """How the ids came about. ``vocabulary_size``: ids lie below it.

    ``special``: ids by use: end (of a document), class, separator, mask, padding; only those that exist.
    """

    name: str
    vocabulary_size: int
    special: Mapping[str, int] = field(default_factory=dict)

    @property
    def padding(self) -> int:
        """The id behind the text of a sequence that is longer; no loss counts it."""
        return self.special.get("padding", self.special.get("end", 0))


@dataclass(frozen=True, slots=True)
class Tokens:
    """``ids`` (an integer dtype) and ``marks`` (uint8): [tokens]; ``ends`` and ``words`` (int64): [documents].

    Arrays may be maps of a file. ``ends`` ascends; its last is the number of tokens. ``words``: between white space.
    ``source``: its name in messages. ``identity``: changes with the content. ``largest``: of the ids; None: not known.
    ``is_supervised``: documents are samples, and only marked tokens are labels. ``is_paired``: two by two of a row.
    """

    ids: np.ndarray
    ends: np.ndarray
    marks: np.ndarray
    words: np.ndarray
    tokenization: Tokenization
    source: str
    identity: str
    largest: int | None = None
    is_supervised: bool = False
    is_paired: bool = False


@dataclass(frozen=True, slots=True)
class TextPart:
    """Bytes of a document, which begin at ``offset`` of ``file``. ``closes``: the document ends with them.

    ``row``: the place of their row, if they are the text of one.
    """

    content: bytes
    closes: bool
    file: Path
    offset: int = 0
    row: str = ""

    def where(self, position: int) -> str:
        """The place of the byte at this position, for an error."""
        return self.row or f"{self.file}, byte {self.offset + position}"


@dataclass(frozen=True, slots=True)
class Piece:
    """``ids`` (an integer dtype) and ``marks`` (uint8): [tokens]; ``num_words``: between white space, begun in it.

    ``closes``: its document ends with it. ``has_end``: with its own end token.
    """

    ids: np.ndarray
    marks: np.ndarray
    num_words: int
    closes: bool = True
    has_end: bool = False


def id_dtype(tokenization: Tokenization) -> np.dtype:
    """The smallest unsigned one that holds every id."""
    return np.min_scalar_type(tokenization.vocabulary_size - 1)


def with_end(piece: Piece, tokenization: Tokenization) -> Piece:
    """A piece that closes its document, and the end token, if there is one."""
    end = tokenization.special.get("end")
    if end is None or not piece.closes or piece.has_end:
        return piece
    ids = np.append(piece.ids.astype(id_dtype(tokenization), copy=False), np.array(end, id_dtype(tokenization)))
    return Piece(ids, np.append(piece.marks, np.uint8(0)), piece.num_words)
