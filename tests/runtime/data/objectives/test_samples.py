"""Samples with labels: only marked tokens count, in every packing; a longer one loses context before labels.
Windows of a text: none spans two documents, and together they hold all of it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.spec.inputs import DataSpec
from runtime.data.objectives.samples import (
    NOTHING,
    counts_of,
    documents,
    inner_sentences,
    pieces_of,
    plain_windows,
    sentence_windows,
)
from runtime.data.reading import gathered, split
from runtime.data.token_batches import make_objective
from runtime.data.tokens import LABEL, ROW, Piece, Tokenization, Tokens, with_end
from runtime.evaluation.rows import windows_of
from tests.tools.examples import examples
from tests.tools.texts import STORY, by_hand, tokens_of

BEGIN, END = 1, 2
ROLES = {"tokens": (8,), "positions": (8,)}


def samples(*given: tuple[list[int], str], rows: list[int] | None = None) -> Tokens:
    """Ids with a text of the same length: ``x`` for each label."""
    made = by_hand(*[ids for ids, _ in given], begin=BEGIN, end=END)
    marks = np.array([LABEL if c == "x" else 0 for _, text in given for c in text], np.uint8)
    starts = np.array([0, *made.ends[:-1]])
    marks[starts[rows if rows is not None else range(len(given))]] |= ROW
    return replace(made, marks=marks, is_supervised=True)


def labels(tokens: Tokens, **data: Any) -> list[tuple[list[int], list[int]]]:
    """Of each sequence: its labels as the model is given them, and as a model reads them that shifts inside."""
    made = make_objective(tokens, 8, DataSpec(**data), 0, ROLES if data["packing"] == "documents" else {})
    found = [made.sample(i, 0) for i in range(made.num_samples)]
    for s in found:
        assert s["labels"][1:].tolist() == s["next_tokens"][:-1].tolist()
        kept = s["labels"] != NOTHING
        assert s["labels"][kept].tolist() == s["tokens"][kept].tolist()
    return [(s["next_tokens"].tolist(), s["labels"].tolist()) for s in found]


N = NOTHING
TWO = [([5, 6, 7, END], "..xx"), ([8, 9, END, 8, 9, 7], ".xx.xx")]


@pytest.mark.parametrize("packing", [False, "documents"])
def test_only_marked_tokens_are_labels(packing: bool | str) -> None:
    found = [label for _, label in labels(samples(*TWO), packing=packing)]
    assert found == [[N, N, 7, END, N, N, N, N], [N, 9, END, N, 9, 7, N, N]]


def test_samples_of_one_sequence_keep_their_labels() -> None:
    small = samples(([5, 6, END], ".xx"), ([7, 8, 9, END], "..xx"))
    assert labels(small, packing="documents") == [([6, END, N, N, 9, END, N, N], [N, 6, END, N, N, 9, END, N])]


def test_padding_that_is_the_end_token_is_no_label_and_the_end_token_is_one() -> None:
    ((_, found),) = labels(samples(([5, END], ".x")), packing=False)
    assert found == [N, END, N, N, N, N, N, N]


LONG = [BEGIN, 11, 12, 13, 14, 15, 16, 17, 18, END]


@pytest.mark.parametrize(
    ("marks", "ids", "told"),
    [
        ("........xx", [BEGIN, 13, 14, 15, 16, 17, 18, END], "2 tokens of context cut away, 0 labels"),
        ("..xxxxxxxx", [BEGIN, 12, 13, 14, 15, 16, 17, 18], "1 tokens of context cut away, 1 labels"),
        (".xxxxxxxxx", [BEGIN, 11, 12, 13, 14, 15, 16, 17], "0 tokens of context cut away, 2 labels"),
    ],
)
def test_a_long_sample_loses_the_left_of_its_context_then_the_end_of_its_answer(
    marks: str, ids: list[int], told: str
) -> None:
    tokens = samples((LONG, marks), ([5, 6], ".x"))
    for packing in (False, "documents"):
        made = make_objective(tokens, 8, DataSpec(packing=packing), 0, ROLES if packing else {})
        assert made.sample(0, 0)["tokens"].tolist() == ids
        assert told in made.told
    without = samples(([9, *LONG[1:]], "........xx"))
    assert pieces_of(without, 8, "cut").of(0)[0].tolist() == [12, 13, 14, 15, 16, 17, 18, END]
    assert counts_of(tokens, 8) == pieces_of(tokens, 8, "cut").told
    assert counts_of(tokens, 10) == "none of 2 is longer than 10 tokens"


def test_a_piece_without_a_label_is_left_out_and_counted() -> None:
    pieces = pieces_of(samples((LONG, "x........."), ([5, 6], ".x")), 8, "cut")
    assert len(pieces) == 1
    assert "1 have no label then and are left out" in pieces.told


@pytest.mark.parametrize("packing", [False, "documents"])
def test_long_samples_and_documents_may_be_dropped_or_refused(packing: bool | str) -> None:
    roles = ROLES if packing else {}
    for tokens in (samples((LONG, "........xx"), ([5, 6], ".x")), by_hand(LONG, [5, 6])):
        made = make_objective(tokens, 8, DataSpec(packing=packing, overlong="drop"), 0, roles)
        assert [made.sample(i, 0)["tokens"][:2].tolist() for i in range(made.num_samples)] == [[5, 6]]
        assert "1 of 2" in made.told
        with pytest.raises(PlanError, match="has 10 tokens, a sequence 8") as error:
            make_objective(tokens, 8, DataSpec(packing=packing, overlong="refuse"), 0, roles)
        assert "drop" in error.value.fix


@pytest.mark.parametrize(
    ("data", "where"), [({"packing": True}, "data.packing"), ({"objective": "masked"}, "data.objective")]
)
def test_windows_over_samples_and_masks_are_refused(data: dict[str, Any], where: str) -> None:
    with pytest.raises(PlanError, match="samples with labels") as error:
        make_objective(samples(*TWO), 8, DataSpec(**data), 0)
    assert error.value.where == where


def test_validation_is_split_between_rows_never_inside_one() -> None:
    tokens = samples(*TWO, ([5, 6], ".x"), ([7, 8], ".x"), rows=[0, 2])
    for share in (0.01, 0.5, 0.7):
        first, second = split(tokens, share)
        assert second is not None
        assert (len(first.ends), len(second.ends)) == (2, 2)
    with pytest.raises(PlanError, match="has one row"):
        split(samples(*TWO, rows=[0]), 0.5)


def test_an_evaluation_scores_labels_alone() -> None:
    rows = windows_of(samples(*TWO), 8, None)
    assert [row.is_label.tolist() for row in rows if row.is_label is not None] == [
        [False, False, True, True],
        [False, True, True, False, True, True],
    ]
    assert (len(rows), rows.num_scored) == (2, 6)
    with pytest.raises(PlanError, match="--stride applies to windows over a text"):
        windows_of(samples(*TWO), 8, 4)


def test_a_sample_has_its_own_end_and_marks_belong_to_the_identity() -> None:
    how = Tokenization("some", 9, {"end": END})
    piece = Piece(np.array([5, END]), np.array([0, LABEL], np.uint8), 1, has_end=True)
    assert with_end(piece, how).ids.tolist() == [5, END]
    other = replace(piece, marks=np.array([LABEL, LABEL], np.uint8))
    assert gathered("", how, [piece]).identity != gathered("", how, [other]).identity


SENTENCES = st.lists(st.integers(1, 12).map(lambda n: "a" * n + "."), min_size=0, max_size=8)
TEXTS = st.lists(SENTENCES.map(" ".join), min_size=1, max_size=5)


def words_of(windows, tokens):
    return [bytes(tokens.ids[begin:stop].tolist()).decode() for begin, stop in windows.tolist()]


def test_runs_of_sentences_are_as_long_as_fits():
    tokens = tokens_of([STORY])
    assert words_of(sentence_windows(tokens, 64), tokens) == [
        "The cat sat down. It slept for an hour. Then it woke up hungry. ",
        "Nobody had left any fish. So it went out.",
    ]


def test_a_sentence_left_alone_takes_the_one_before_it_along():
    tokens = tokens_of(["a. b. c. ", "d. e."])
    assert words_of(sentence_windows(tokens, 6), tokens) == ["a. b. ", "b. c. ", "d. e."]


def test_a_document_of_one_sentence_gives_no_pair():
    tokens = tokens_of(["Alone.", "", "One. Two."])
    assert words_of(sentence_windows(tokens, 64), tokens) == ["One. Two."]


def test_the_end_token_needs_no_room():
    assert words_of(sentence_windows(tokens_of(["a. b.", "c. d."]), 5), tokens_of(["a. b.", "c. d."])) == [
        "a. b.",
        "c. d.",
    ]


def test_plain_windows_lie_end_to_end_in_each_document():
    tokens = tokens_of(["abcdefgh", "", "ijk"])
    assert words_of(plain_windows(tokens, 3), tokens) == ["abc", "def", "gh", "ijk"]


@examples(60)
@given(TEXTS, st.integers(1, 30))
def test_plain_windows_hold_every_token_once(texts, most):
    tokens = tokens_of(texts)
    windows = plain_windows(tokens, most)
    seen = [i for window in windows.tolist() for i in range(*window)]
    heads, tails = documents(tokens)
    assert seen == [i for a, b in zip(heads, tails, strict=True) for i in range(a, b)]
    assert all(b - a <= most for a, b in windows.tolist())


@examples(60)
@given(TEXTS, st.integers(4, 40), st.integers(1, 60))
def test_sentence_windows_do_not_depend_on_how_many_tokens_are_looked_at_together(texts, most, at_once):
    whole, parts = (sentence_windows(tokens_of(texts), most, size) for size in (1 << 20, at_once))
    assert whole.tolist() == parts.tolist()


@examples(60)
@given(TEXTS, st.integers(4, 40))
def test_sentence_windows_hold_two_sentences_of_one_document_and_miss_no_pair(texts, most):
    tokens = tokens_of(texts)
    windows = sentence_windows(tokens, most)
    seen = np.zeros(len(tokens.ids), dtype=int)
    for begin, stop in windows.tolist():
        seen[begin:stop] += 1
        assert len(inner_sentences(tokens.marks, begin, stop)) >= 1
        assert 0 not in tokens.ids[begin:stop]  # an end token
        assert stop - begin <= most or len(inner_sentences(tokens.marks, begin, stop)) == 1
    for head, tail in zip(*documents(tokens), strict=True):
        is_pair = len(inner_sentences(tokens.marks, head, tail)) >= 1
        assert (seen[head:tail] >= 1).all() if is_pair else not seen[head:tail].any()
