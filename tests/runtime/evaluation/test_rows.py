"""Windows score every token but the first once, passages the last word of a document; rows of both become the inputs of
a spec by their roles.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from passes.partition.loss.scored import Pick, Scored
from planner import PlanError
from planner.spec.spec import Spec
from runtime.data.reading import read_tokens
from runtime.data.tokens import SENTENCE, WORD, Tokenization, Tokens
from runtime.engine.log_probs import Scores
from runtime.evaluation.evaluate import ALONE, NO_WORD, TOO_LONG, passages_of
from runtime.evaluation.rows import Row, RowBatches, Windows


@given(num=st.integers(2, 60), span=st.integers(2, 20), data=st.data())
def test_each_token_is_scored_once_and_in_order(num: int, span: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, span - 1))
    windows = Windows(np.arange(num, dtype=np.uint16), span, stride, "text")
    rows = list(windows)
    assert len(rows) == len(windows)
    assert [int(i) for row in rows for i in row.ids[row.first :]] == list(range(1, num))
    assert all(len(row.ids) == min(span, num) and (np.diff(row.ids) == 1).all() for row in rows)
    assert all(len(row.ids) - row.first <= stride for row in rows[1:])
    assert all(len(row.ids) - row.first == stride for row in rows[1:-1])


def test_the_first_window_scores_all_and_the_last_ends_with_the_text() -> None:
    rows = list(Windows(np.arange(12), 6, 4, "text"))
    assert [(row.ids.tolist(), row.first) for row in rows] == [
        ([0, 1, 2, 3, 4, 5], 1),
        ([4, 5, 6, 7, 8, 9], 2),
        ([6, 7, 8, 9, 10, 11], 4),
    ]


@pytest.mark.parametrize(
    ("num", "stride", "what"),
    [
        (1, 2, "text holds 1 tokens, too few to predict one"),
        (0, 2, "text holds 0 tokens"),
        (9, 6, "a window predicts 5 tokens, so that a stride of 6 would skip some"),
    ],
)
def test_what_cannot_be_scored_is_refused(num: int, stride: int, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        Windows(np.arange(num), 6, stride, "text")


# ---- The last word of a document: its tokens, without what closes the document, behind as much as a window holds


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


# ---- Rows become the inputs of a spec by their roles; what a model does not score is told, and what it skips by value


LENGTH = 4


def batches(*names: str, ignored: int = -100, **data: Any) -> RowBatches:
    inputs = {name: {"shape": [LENGTH], "dtype": "int64"} for name in names}
    spec = Spec.load({"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": inputs, "data": data})
    return RowBatches(spec, Scored(names[1], 9, (Pick("loss", 1, 1, 9, ignored),)))


def scores(is_scored: list[list[int]]) -> Scores:
    held = torch.tensor(is_scored, dtype=torch.bool)
    return Scores("", torch.arange(2.0 * LENGTH).view(2, LENGTH), held, held)


def test_a_short_row_is_padded_and_a_row_that_lacks_is_a_sequence_all_the_same() -> None:
    found = batches("ids", "targets", "attention_mask", "position_ids", inputs={"ids": "tokens"})
    made = found.batch([Row(np.array([5, 6, 7]), 1)])
    assert (found.span, found.size) == (5, 2)
    assert made["ids"].tolist() == [[5, 6, 7, 0], [0] * 4]
    assert made["targets"].tolist() == [[6, 7, 0, 0], [0] * 4]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 0], [1] * 4]
    assert made["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


def test_a_score_is_found_where_the_label_of_its_token_is() -> None:
    row = Row(np.array([5, 6, 7]), 1)
    ((shifted, _),) = batches("input_ids", "labels").scores_of([row], scores([[0, 1, 1, 1]] * 2))
    ((given, _),) = batches("input_ids", "targets").scores_of([row], scores([[1, 1, 1, 1]] * 2))
    assert (shifted.tolist(), given.tolist()) == ([1.0, 2.0], [0.0, 1.0])


def test_a_token_that_the_loss_ignores_by_value_is_left_out() -> None:
    found = batches("input_ids", "labels", ignored=6)
    ((log_probabilities, is_top),) = found.scores_of([Row(np.array([5, 6, 7]), 1)], scores([[0, 0, 1, 1]] * 2))
    assert (log_probabilities.tolist(), is_top.tolist()) == ([2.0], [True])


@pytest.mark.parametrize(
    ("is_scored", "what"),
    [([[0, 0, 1, 1]] * 2, "the loss does not score every token"), ([[1] * 4] * 2, "it does not shift its labels")],
)
def test_a_model_that_predicts_other_tokens_is_told(is_scored: list[list[int]], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        batches("input_ids", "labels").scores_of([Row(np.array([5, 6, 7]), 1)], scores(is_scored))
