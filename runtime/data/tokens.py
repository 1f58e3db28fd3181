"""A text as token ids, with the ends of documents and the starts of words and sentences, for batches and scores.

    ids      | 17 4 98 3 0 | 52 7 7 0 |        one after another
    ends               5          9            the end of each document, including its end token
    marks      s w   w       s   w             bits: a word begins here, a sentence begins here; of samples with
                                               labels instead: this token is a label, a row begins here
    words          3           2               of the text before it was cut into tokens

A text far larger than memory is a map of a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

WORD, SENTENCE, LABEL, ROW = 1, 2, 4, 8  # bits of a mark


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
    ``is_supervised``: documents are samples, and only marked tokens are labels.
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
