"""Text on its way: parts of documents become pieces of tokens, never more of them in memory than a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from runtime.data.tokens import Tokenization


@dataclass(frozen=True, slots=True)
class Part:
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


class Encoder(Protocol):
    """Cuts text into tokens."""

    @property
    def tokenization(self) -> Tokenization: ...

    def pieces(self, parts: Iterable[Part]) -> Iterator[Piece]:
        """The tokens of parts in their order. Raises PlanError for anything that is not text."""
        ...


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
