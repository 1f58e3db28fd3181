"""Windows of a text: none spans two documents, and together they hold all of it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.objectives.samples import documents, inner_sentences, plain_windows, sentence_windows
from tests.tools.examples import examples
from tests.tools.texts import STORY, tokens_of

SENTENCES = st.lists(st.integers(1, 12).map(lambda n: "a" * n + "."), min_size=0, max_size=8)
TEXTS = st.lists(SENTENCES.map(" ".join), min_size=1, max_size=5)


def words_of(windows, tokens):
    return [bytes(tokens.ids[slice(*windows.span(i))].tolist()).decode() for i in range(len(windows))]


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
    seen = [i for n in range(len(windows)) for i in range(*windows.span(n))]
    heads, tails = documents(tokens)
    assert seen == [i for a, b in zip(heads, tails, strict=True) for i in range(a, b)]
    assert all(b - a <= most for a, b in map(windows.span, range(len(windows))))


@examples(60)
@given(TEXTS, st.integers(4, 40), st.integers(1, 60))
def test_sentence_windows_do_not_depend_on_how_many_tokens_are_looked_at_together(texts, most, at_once):
    whole, parts = (sentence_windows(tokens_of(texts), most, size) for size in (1 << 20, at_once))
    assert whole.begins.tolist() == parts.begins.tolist()
    assert whole.stops.tolist() == parts.stops.tolist()


@examples(60)
@given(TEXTS, st.integers(4, 40))
def test_sentence_windows_hold_two_sentences_of_one_document_and_miss_no_pair(texts, most):
    tokens = tokens_of(texts)
    windows = sentence_windows(tokens, most)
    seen = np.zeros(len(tokens.ids), dtype=int)
    for begin, stop in map(windows.span, range(len(windows))):
        seen[begin:stop] += 1
        assert len(inner_sentences(tokens.marks, begin, stop)) >= 1
        assert 0 not in tokens.ids[begin:stop]  # an end token
        assert stop - begin <= most or len(inner_sentences(tokens.marks, begin, stop)) == 1
    for head, tail in zip(*documents(tokens), strict=True):
        is_pair = len(inner_sentences(tokens.marks, head, tail)) >= 1
        assert (seen[head:tail] >= 1).all() if is_pair else not seen[head:tail].any()
