"""What an encoder gives of a piece of a document."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Piece:
    """``ids`` (an integer dtype) and ``marks`` (uint8): [tokens]; ``num_words``: between white space, begun in it."""

    ids: np.ndarray
    marks: np.ndarray
    num_words: int
