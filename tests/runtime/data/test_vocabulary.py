"""Ids that the model has no row for are told before training, by file and position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from planner.spec.inputs import InputSpec
from runtime.data.reading import check_vocabulary
from runtime.data.tokens import Tokens

Make = Callable[..., Tokens]
ROWS = IdRange(0, 100, None, ((0, 4),), "the embedding wte", "rows")


def check(tokens: Tokens, high: int | None = None, ranges: Any = (), role: str = "tokens") -> None:
    check_vocabulary(tokens, {"x": InputSpec(shape=(4,), high=high)}, {"x": role}, {"x": ranges})


def test_a_vocabulary_that_fits_is_not_looked_at(make_tokens: Make) -> None:
    check(make_tokens([1, 2], vocabulary_size=100), high=100, ranges=[ROWS])
    check(make_tokens([1, 2], vocabulary_size=101), role="positions", ranges=[ROWS])


@pytest.mark.parametrize("largest", [None, 150])
def test_the_first_bad_id_is_named_with_file_and_position(make_tokens: Make, largest: int | None) -> None:
    tokens = replace(make_tokens([1, 99, 100, 150], vocabulary_size=200), source="a.tokens", largest=largest)
    with pytest.raises(PlanError, match=r"a\.tokens has the id 100 at position 2, but the embedding wte"):
        check(tokens, ranges=[ROWS])
    with pytest.raises(PlanError, match=r"a.tokens has the id 150 at position 3, but inputs.x.high is 120") as error:
        check(tokens, high=120)
    assert error.value.where == "inputs.x.high"
    assert "at least 200" in error.value.fix


@pytest.mark.parametrize("largest", [None, 99])
def test_a_tokenizer_with_more_ids_than_the_model_is_refused_whatever_the_text(
    make_tokens: Make, largest: int | None
) -> None:
    tokens = replace(make_tokens([1, 99], vocabulary_size=101), largest=largest)
    with pytest.raises(
        PlanError, match="the tokenizer by hand has ids up to 100, but the embedding wte has rows 0 to 99"
    ):
        check(tokens, ranges=[ROWS])


def test_a_header_that_knows_its_largest_id_spares_the_reading(make_tokens: Make) -> None:
    """The arrays would be a file of a terabyte."""
    tokens = replace(make_tokens([1], vocabulary_size=200), ids=None, largest=50)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="has ids up to 199"):
        check(tokens, high=100)
