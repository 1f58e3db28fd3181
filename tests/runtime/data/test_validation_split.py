"""What is held out: the end of the text, whole documents, and nothing that is trained on."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.reading import split
from runtime.data.tokens import Tokens
from tests.runtime.data.conftest import by_hand

Make = Callable[..., Tokens]


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=9), st.floats(0.01, 0.99))
def test_two_parts_of_whole_documents_make_the_text(sizes: list[int], share: float) -> None:
    numbers = iter(range(1000))
    tokens = by_hand(*([next(numbers) for _ in range(size)] for size in sizes))
    first, second = split(tokens, share)
    assert second is not None
    assert [*first.ids, *second.ids] == tokens.ids.tolist()
    assert [*first.ends, *(second.ends + len(first.ids))] == tokens.ends.tolist()
    assert [*first.words, *second.words] == tokens.words.tolist()
    assert len(first.ends) >= 1 <= len(second.ends)
    wanted = round((1 - share) * len(tokens.ids))
    nearest = min(abs(int(end) - wanted) for end in tokens.ends[:-1])
    assert abs(len(first.ids) - wanted) == nearest
    assert len({tokens.identity, first.identity, second.identity}) == 3


def test_a_text_of_one_document_is_cut_inside(make_tokens: Make) -> None:
    first, second = split(make_tokens(list(range(100))), 0.1)
    assert second is not None
    assert first.ids.tolist() == list(range(90))
    assert second.ids.tolist() == list(range(90, 100))
    assert (first.ends.tolist(), second.ends.tolist()) == ([90], [10])
    assert (first.words.tolist(), second.words.tolist()) == ([90], [10])


def test_without_a_share_nothing_is_held_out(make_tokens: Make) -> None:
    tokens = make_tokens([1, 2, 3])
    first, second = split(tokens, 0.0)
    assert first is tokens
    assert second is None


def test_a_part_is_named_as_such(make_tokens: Make) -> None:
    tokens = make_tokens([1], [2])
    first, second = split(tokens, 0.5)
    assert second is not None
    assert second.source == f"the held-out part of {tokens.source}"
    assert first.source == f"{tokens.source} without its held-out part"
