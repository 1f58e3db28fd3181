"""A text as token ids, with the ends of documents and the starts of words and sentences, for batches and scores.

ids      | 17 4 98 3 0 | 52 7 7 0 |        documents one after another
ends               5          9            the end of each document, including its end token
marks      s w   w       s   w             bits: a word begins here, a sentence begins here; in samples with
                                           labels instead: this token is a label, a row begins here
words          3           2               number of words in the text of each document
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

WORD, SENTENCE, LABEL, ROW = 1, 2, 4, 8  # bits of a mark
PAIRS = "pairs"  # the key of their two fields in a token file


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The name of a tokenizer (a file name, or ``bytes``) and its vocabulary: ids are below ``vocabulary_size``.

    ``special``: ids by use: end (of a document), class, separator, mask, padding; only those that exist.
    """

    name: str
    vocabulary_size: int
    special: Mapping[str, int] = field(default_factory=dict)

    @property
    def padding(self) -> int:
        """The id that fills a sequence after its text; no loss counts it."""
        return self.special.get("padding", self.special.get("end", 0))


@dataclass(frozen=True, slots=True)
class Tokens:
    """A tokenized text: ``ids`` (integers) and ``marks`` (uint8) [tokens], ``ends`` and ``words`` (int64) [documents].

    Arrays may be memory-mapped. ``ends`` ascends; its last element is the number of tokens. ``words``: number of words,
    separated by white space. ``source``: the name of the text in messages. ``identity``: a hash of the content.
    ``largest``: the largest id; None if unknown. ``is_supervised``: documents are samples, and only tokens with the
    mark ``LABEL`` are labels. ``is_paired``: two consecutive samples are the pair of one row.
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
    """Consecutive bytes of a document, from byte ``offset`` of ``file``. ``closes``: the document ends with them.

    ``row``: place of the row for errors, if the text is a field of a row.
    """

    content: bytes
    closes: bool
    file: Path
    offset: int = 0
    row: str = ""

    def where(self, position: int) -> str:
        """Return the place of the byte at ``position`` of ``content``, for an error."""
        return self.row or f"{self.file}, byte {self.offset + position}"


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a document: ``ids`` (an integer dtype) and ``marks`` (uint8), both [tokens].

    ``num_words``: words that begin in the piece. ``closes``: the document ends with it. ``has_end``: its last token is
    the end token.
    """

    ids: np.ndarray
    marks: np.ndarray
    num_words: int
    closes: bool = True
    has_end: bool = False


def id_dtype(tokenization: Tokenization) -> np.dtype:
    """Return the smallest unsigned dtype that holds every id of the vocabulary."""
    return np.min_scalar_type(tokenization.vocabulary_size - 1)


def with_end(piece: Piece, tokenization: Tokenization) -> Piece:
    """Return the piece with the end token appended, if it closes its document and the tokenization has an end token."""
    end = tokenization.special.get("end")
    if end is None or not piece.closes or piece.has_end:
        return piece
    ids = np.append(piece.ids.astype(id_dtype(tokenization), copy=False), np.array(end, id_dtype(tokenization)))
    return Piece(ids, np.append(piece.marks, np.uint8(0)), piece.num_words)
