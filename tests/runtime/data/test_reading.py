"""What ``--data`` names: bytes of files, each a document; its held-out end; ids that the model has no row for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from planner.spec.inputs import InputSpec
from runtime.data.reading import check_vocabulary, read_tokens, split
from runtime.data.tokens import Tokens
from tests.tools.texts import by_hand


def test_the_standard_library_is_a_text_of_its_own() -> None:
    tokens = read_tokens("stdlib")
    assert len(tokens.ids) > 1_000_000
    assert len(tokens.ends) > 100


def test_a_directory_is_read_in_sorted_order_each_file_a_document(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("two")
    (tmp_path / "a").write_text("one of")
    (tmp_path / "empty").touch()
    tokens = read_tokens(str(tmp_path))
    assert tokens.ids.tobytes() == b"one of\0two\0"
    assert tokens.ends.tolist() == [7, 11]
    assert tokens.words.tolist() == [2, 1]


def test_identity_changes_with_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    first = read_tokens(str(tmp_path)).identity
    assert read_tokens(str(tmp_path)).identity == first
    (tmp_path / "a").write_text("two")
    assert read_tokens(str(tmp_path)).identity != first


def test_nothing_to_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(PlanError, match="the data is empty"):
        read_tokens(str(tmp_path / "empty"))
    with pytest.raises(PlanError, match="no file or directory no_such_file"):
        read_tokens("no_such_file")


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


def test_a_text_of_one_document_is_cut_inside() -> None:
    first, second = split(by_hand(list(range(100))), 0.1)
    assert second is not None
    assert first.ids.tolist() == list(range(90))
    assert second.ids.tolist() == list(range(90, 100))
    assert (first.ends.tolist(), second.ends.tolist()) == ([90], [10])
    assert (first.words.tolist(), second.words.tolist()) == ([90], [10])


def test_without_a_share_nothing_is_held_out() -> None:
    tokens = by_hand([1, 2, 3])
    first, second = split(tokens, 0.0)
    assert first is tokens
    assert second is None


def test_a_part_is_named_as_such() -> None:
    tokens = by_hand([1], [2])
    first, second = split(tokens, 0.5)
    assert second is not None
    assert second.source == f"the held-out part of {tokens.source}"
    assert first.source == f"{tokens.source} without its held-out part"


ROWS = IdRange(0, 100, None, ((0, 4),), "the embedding wte", "rows")


def check(tokens: Tokens, high: int | None = None, ranges: Any = (), role: str = "tokens") -> None:
    check_vocabulary(tokens, {"x": InputSpec(shape=(4,), high=high)}, {"x": role}, {"x": ranges})


def test_a_vocabulary_that_fits_is_not_looked_at() -> None:
    check(by_hand([1, 2], vocabulary_size=100), high=100, ranges=[ROWS])
    check(by_hand([1, 2], vocabulary_size=101), role="positions", ranges=[ROWS])


@pytest.mark.parametrize("largest", [None, 150])
def test_the_first_bad_id_is_named_with_file_and_position(largest: int | None) -> None:
    tokens = replace(by_hand([1, 99, 100, 150], vocabulary_size=200), source="a.tokens", largest=largest)
    with pytest.raises(PlanError, match=r"a\.tokens has the id 100 at position 2, but the embedding wte"):
        check(tokens, ranges=[ROWS])
    with pytest.raises(PlanError, match=r"a.tokens has the id 150 at position 3, but inputs.x.high is 120") as error:
        check(tokens, high=120)
    assert error.value.where == "inputs.x.high"
    assert "at least 200" in error.value.fix


@pytest.mark.parametrize("largest", [None, 99])
def test_a_tokenizer_with_more_ids_than_the_model_is_refused_whatever_the_text(largest: int | None) -> None:
    tokens = replace(by_hand([1, 99], vocabulary_size=101), largest=largest)
    with pytest.raises(
        PlanError, match="the tokenizer by hand has ids up to 100, but the embedding wte has rows 0 to 99"
    ):
        check(tokens, ranges=[ROWS])


def test_a_header_that_knows_its_largest_id_spares_the_reading() -> None:
    """The arrays would be a file of a terabyte."""
    tokens = replace(by_hand([1], vocabulary_size=200), ids=None, largest=50)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="has ids up to 199"):
        check(tokens, high=100)
