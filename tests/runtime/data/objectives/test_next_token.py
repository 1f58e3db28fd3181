"""Windows of next_token, over documents or inside them, and documents packed whole: each token is asked for once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import PlanError, SpecError
from planner.spec.inputs import DataSpec
from planner.spec.spec import Spec
from runtime.data.objectives.next_token import BLOCK, fill, next_token
from runtime.data.tokens import Tokens
from tests.tools.texts import by_hand

pytestmark = pytest.mark.check
ROLES = {"tokens", "labels", "positions"}


def samples(tokens: Tokens, length: int, packing: bool | str = True, **more: str) -> list[dict[str, list[int]]]:
    data = DataSpec.model_validate({"packing": packing, **more})
    found = next_token(tokens, length, data, 1, dict.fromkeys(ROLES, (length,)))
    return [{role: v.tolist() for role, v in found.sample(i, 0).items()} for i in range(found.num_samples)]


def numbered(sizes: list[int]) -> list[list[int]]:
    """Documents of these sizes; no id comes twice."""
    numbers = iter(range(2000))
    return [[next(numbers) for _ in range(size)] for size in sizes]


def test_packed_windows_run_on_over_documents() -> None:
    first, second = samples(by_hand([10, 11, 12], [20, 21, 22, 23], [30, 31]), 4)
    assert first["tokens"] == [10, 11, 12, 20]
    assert first["next_tokens"] == [11, 12, 20, 21]
    assert second["tokens"] == [21, 22, 23, 30]
    assert second["next_tokens"] == [22, 23, 30, 31]
    assert first["labels"] == first["tokens"]
    assert first["attention_mask"] == [1, 1, 1, 1]
    assert first["segments"] == [0, 0, 0, 0]
    assert first["positions"] == [0, 1, 2, 3]


def test_windows_of_documents_are_padded_where_nothing_counts() -> None:
    first, second, third = samples(by_hand([10, 11, 12, 13, 14], [20], [30, 31], padding=7), 3, packing=False)
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
    documents = numbered(sizes)
    tokens = by_hand(*documents, vocabulary_size=2000)
    wanted = [token for document in documents for token in document[1:]]
    if not wanted:
        with pytest.raises(PlanError, match="holds 1 tokens in its longest document"):
            samples(tokens, length, packing=False)
        return
    found = samples(tokens, length, packing=False)
    assert [t for sample in found for t in sample["next_tokens"] if t != -100] == wanted


@pytest.mark.parametrize("packing", [True, False])
def test_a_text_shorter_than_a_sequence_is_refused(packing: bool) -> None:
    short = by_hand([1, 2, 3]) if packing else by_hand([1], [2])
    with pytest.raises(PlanError, match=r"by hand holds \d tokens.*, a sequence takes \d") as error:
        samples(short, 3, packing)
    assert error.value.where == "--data"


def test_each_document_begins_anew() -> None:
    first, second = samples(
        by_hand([10, 11, 12, 13], [20, 21], [30, 31, 32], [40, 41, 42, 43, 44], padding=7), 8, "documents"
    )
    assert first["tokens"] == [10, 11, 12, 13, 20, 21, 7, 7]
    assert first["positions"] == [0, 1, 2, 3, 0, 1, 0, 1]
    assert first["documents"] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert first["labels"] == [-100, 11, 12, 13, -100, 21, -100, -100]
    assert first["next_tokens"] == [11, 12, 13, -100, 21, -100, -100, -100]
    assert first["attention_mask"] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert second["tokens"] == [30, 31, 32, 40, 41, 42, 43, 44]


def test_a_document_longer_than_a_sequence_is_cut_or_refused() -> None:
    text = by_hand([1, 2], [*range(10, 19)])
    assert sorted(s["tokens"] for s in samples(text, 4, "documents")) == [
        [1, 2, 0, 0],
        [10, 11, 12, 13],
        [14, 15, 16, 17],
    ]
    with pytest.raises(PlanError, match=r"document 1 of by hand has 9 tokens, a sequence 4; 1 of 2 documents") as error:
        samples(text, 4, "documents", overlong="refuse")
    assert error.value.where == "data.overlong"


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(2, 12))
def test_each_pair_of_a_document_is_asked_for_once(sizes: list[int], length: int) -> None:
    documents = numbered(sizes)
    tokens = by_hand(*documents, vocabulary_size=2000)
    pieces = [d[i : i + length] for d in documents for i in range(0, len(d), length)]
    wanted = sorted((a, b) for piece in pieces for a, b in pairwise(piece))
    if not wanted:
        with pytest.raises(PlanError, match="in its longest document, a sequence takes 2"):
            samples(tokens, length, "documents")
        return
    found = samples(tokens, length, "documents")
    asked = [(t, n) for s in found for t, n in zip(s["tokens"], s["next_tokens"], strict=True) if n != -100]
    shifted = [(s["tokens"][i - 1], y) for s in found for i, y in enumerate(s["labels"]) if y != -100]
    assert sorted(asked) == sorted(shifted) == wanted
    for s in found:
        starts = [i for i, position in enumerate(s["positions"]) if position == 0]
        assert starts == [i for i, d in enumerate(s["documents"]) if i == 0 or d != s["documents"][i - 1]]


@given(st.lists(st.integers(1, 50), max_size=200))
def test_sequences_hold_each_piece_once_and_no_more_than_fits(sizes: list[int]) -> None:
    order, ends = fill(np.array(sizes, np.int64), 50, 50)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    sums = [int(np.array(sizes)[part].sum()) for part in np.split(order, ends[:-1])] if len(ends) else []
    assert all(0 < n <= 50 for n in sums)
    assert sum(1 for n in sums if n <= 25) <= 1  # two of them would be one


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(1, 4))
def test_sequences_hold_no_more_pieces_than_there_is_place_for(sizes: list[int], most: int) -> None:
    order, ends = fill(np.array(sizes, np.int64), 50, most)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert all(0 < n <= most for n in np.diff(ends, prepend=0))


def test_a_mask_and_ends_say_the_same_as_numbers() -> None:
    tokens, length = by_hand([1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11, 12]), 9
    roles = {"tokens": (length,), "cu_seqlens": (5,), "document_mask": (1, length, length)}
    found = next_token(tokens, length, DataSpec(packing="documents"), 1, roles)
    assert found.num_samples
    for index in range(found.num_samples):
        sample = found.sample(index, 0)
        numbers, ends = sample["documents"], sample["cu_seqlens"]
        assert ends[0] == 0
        assert ends[-1] == length
        assert (numbers == (np.arange(length)[:, None] >= ends[None, 1:]).sum(-1)).all()
        assert (sample["document_mask"] == np.tril(numbers[:, None] == numbers[None, :])[None]).all()


def test_ends_need_place_for_a_document() -> None:
    text = by_hand([1, 2, 3])
    with pytest.raises(PlanError, match="cu_seqlens has 2 numbers"):
        next_token(text, 4, DataSpec(packing="documents"), 1, {"cu_seqlens": (2,)})


def test_documents_of_a_third_of_the_length_leave_little_padding() -> None:
    sizes = np.random.default_rng(0).integers(1, 2 * 512 // 3, 3 * BLOCK)
    _, ends = fill(sizes, 512, 512)
    assert sizes.sum() / (512 * len(ends)) > 0.98


def test_a_mask_of_zeros_and_ones_cannot_tell_documents() -> None:
    roles = ("tokens", "labels", "positions", "attention_mask")
    with pytest.raises(PlanError, match="with an attention_mask of zeros and ones") as error:
        next_token(by_hand([1, 2, 3]), 4, DataSpec(packing="documents"), 1, dict.fromkeys(roles, (4,)))
    assert error.value.where == "data.packing"


def test_masked_words_and_other_words_are_refused() -> None:
    for data, what in (
        ({"objective": "masked", "packing": "documents"}, "is for objective: next_token"),
        ({"packing": "none"}, "packing"),
        ({"overlong": "keep"}, "overlong"),
    ):
        with pytest.raises(SpecError, match=what):
            Spec.load({"mesh": {}, "batch": {"global": 1, "micro": 1}, "inputs": {}, "data": data})
