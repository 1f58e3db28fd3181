"""Words and sentences of bytes: found alike however a document is cut into pieces."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.text.encoders import ByteEncoder
from runtime.data.tokens import SENTENCE, WORD

TEXTS = st.text(alphabet="ab.!? \n\t", max_size=40).map(str.encode)


def begun(text: bytes, bit: int) -> list[int]:
    return np.flatnonzero(ByteEncoder().encode(text).marks & bit).tolist()


def test_words_begin_after_white_space() -> None:
    piece = ByteEncoder().encode(b"one two,  three\n")
    assert np.flatnonzero(piece.marks & WORD).tolist() == [0, 4, 10]
    assert piece.num_words == 3
    assert piece.ids.tobytes() == b"one two,  three\n"


def test_sentences_begin_after_stops_and_between_paragraphs() -> None:
    assert begun(b"a b. c! d? e.f g\nh\n\ni\n j", SENTENCE) == [0, 5, 8, 11, 20, 23]


@settings(deadline=None)
@given(TEXTS)
def test_marks_are_those_of_a_plain_search(text: bytes) -> None:
    words = [found.start() for found in re.finditer(rb"\S+", text)]
    sentences = [at for at in words if not text[:at].strip() or re.search(rb"([.!?]\s+|\n\s+)$", text[:at])]
    assert begun(text, WORD) == words
    assert begun(text, SENTENCE) == sentences


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, 40), max_size=5))
def test_pieces_give_what_the_whole_gives(text: bytes, cuts: list[int]) -> None:
    whole, encoder = ByteEncoder().encode(text), ByteEncoder()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [encoder.encode(text[a:b], False) for a, b in pairwise(places)]
    assert np.concatenate([piece.marks for piece in pieces]).tolist() == whole.marks.tolist()
    assert sum(piece.num_words for piece in pieces) == whole.num_words
