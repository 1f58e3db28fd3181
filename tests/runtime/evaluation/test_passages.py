"""The last word of a document: its tokens, without what closes the document, behind as much as a window holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner import PlanError
from runtime.data.reading import read_tokens
from runtime.data.tokens import SENTENCE, WORD, Tokenization, Tokens
from runtime.evaluation.evaluate import ALONE, NO_WORD, TOO_LONG, passages_of


def tokens_of(*documents: str) -> Tokens:
    """Letters are ids, a capital begins a word, ``.`` closes a document."""
    ids = np.array([ord(c.lower()) for text in documents for c in text], np.uint16)
    marks = np.array([(WORD | SENTENCE) * c.isupper() for text in documents for c in text], np.uint8)
    ends, words = np.cumsum([len(text) for text in documents]), np.zeros(len(documents), np.int64)
    return Tokens(ids, ends, marks, words, Tokenization("letters", 128, {"end": ord(".")}), "letters", "")


def shown(tokens: Tokens, span: int) -> list[str]:
    """``window|scored`` of each passage."""
    rows = passages_of(tokens, span).rows
    return [
        f"{bytes(row.ids.tolist()[: row.first]).decode()}|{bytes(row.ids.tolist()[row.first :]).decode()}"
        for row in rows
    ]


def test_the_last_word_is_what_begins_last() -> None:
    assert shown(tokens_of("TheCatSat.", "AB", "oneTwo."), 20) == ["thecat|sat", "a|b", "one|two"]


def test_a_long_passage_keeps_its_end() -> None:
    found = passages_of(tokens_of("TheCatSat.", "AB."), 5)
    assert [bytes(row.ids.tolist()) for row in found.rows] == [b"atsat", b"ab"]
    assert (found.num_cut, found.left_out) == (1, {})


def test_what_is_left_out_is_counted_by_its_reason() -> None:
    found = passages_of(tokens_of("nothing.", "Alone.", ".", "A", "TheElephant.", "AB."), 8)
    assert len(found.rows) == 1
    assert found.left_out == {NO_WORD: 2, ALONE: 2, TOO_LONG: 1}


def test_white_space_at_the_end_of_bytes_is_no_part_of_the_word(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat sat\n\n")
    (tmp_path / "b.txt").write_text(" a b")
    assert shown(read_tokens(str(tmp_path)), 20) == ["the cat |sat", " a |b"]


def test_a_text_without_passages_is_refused_with_the_reasons() -> None:
    with pytest.raises(PlanError, match=r"has no passage with a last word to predict .*2 documents: it has nothing"):
        passages_of(tokens_of("A.", "B."), 8)
