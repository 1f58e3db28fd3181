"""Windows of next_token: over documents or inside them; every token but the first is asked for once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.spec.inputs import DataSpec
from runtime.data.objectives.next_token import next_token
from runtime.data.tokens import Tokenization, Tokens

Make = Callable[..., Tokens]


def samples(tokens: Tokens, length: int, packing: bool = True) -> list[dict[str, list[int]]]:
    found = next_token(tokens, length, DataSpec(packing=packing), 1)
    return [{role: v.tolist() for role, v in found.sample(i, 0).items()} for i in range(found.num_samples)]


def test_packed_windows_run_on_over_documents(make_tokens: Make) -> None:
    first, second = samples(make_tokens([10, 11, 12], [20, 21, 22, 23], [30, 31]), 4)
    assert first["tokens"] == [10, 11, 12, 20]
    assert first["next_tokens"] == [11, 12, 20, 21]
    assert second["tokens"] == [21, 22, 23, 30]
    assert second["next_tokens"] == [22, 23, 30, 31]
    assert first["labels"] == first["tokens"]
    assert first["attention_mask"] == [1, 1, 1, 1]
    assert first["segments"] == [0, 0, 0, 0]
    assert first["positions"] == [0, 1, 2, 3]


def test_windows_of_documents_are_padded_where_nothing_counts(make_tokens: Make) -> None:
    first, second, third = samples(make_tokens([10, 11, 12, 13, 14], [20], [30, 31], padding=7), 3, packing=False)
    assert first["tokens"] == [10, 11, 12]
    assert first["next_tokens"] == [11, 12, 13]
    assert second["tokens"] == [13, 14, 7]
    assert second["labels"] == [13, 14, -100]
    assert second["next_tokens"] == [14, -100, -100]
    assert second["attention_mask"] == [1, 1, 0]
    assert third["tokens"] == [30, 31, 7]  # the document of one token asks for nothing


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_inside_documents_each_token_but_a_first_is_asked_for_once(sizes: list[int], length: int) -> None:
    numbers = iter(range(1000))
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    ids, ends = np.concatenate(documents), np.cumsum(sizes)
    tokens = Tokens(ids, ends, np.ones(len(ids), np.uint8), np.array(sizes), Tokenization("", 1000), "", "")
    wanted = [token for document in documents for token in document[1:]]
    if not wanted:
        with pytest.raises(PlanError, match="holds 1 tokens in its longest document"):
            samples(tokens, length, packing=False)
        return
    found = samples(tokens, length, packing=False)
    assert [t for sample in found for t in sample["next_tokens"] if t != -100] == wanted


@pytest.mark.parametrize("packing", [True, False])
def test_a_text_shorter_than_a_sequence_is_refused(make_tokens: Make, packing: bool) -> None:
    short = make_tokens([1, 2, 3]) if packing else make_tokens([1], [2])
    with pytest.raises(PlanError, match=r"by hand holds \d tokens.*, a sequence takes \d") as error:
        samples(short, 3, packing)
    assert error.value.where == "--data"
