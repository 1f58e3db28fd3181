"""A plan says which layers hold experts, and that they are cut as other matrices are."""

from typing import Any

import pytest

from planner import plan
from tests.models import experts


def rows(layer: Any, **mesh: int) -> list[str]:
    given = {"shape": [experts.LENGTH], "dtype": "int64", "high": experts.VOCABULARY}
    spec = {
        "mesh": mesh,
        "batch": {"global": 4, "micro": 2},
        "inputs": {"input_ids": given, "labels": given},
        "tensor_parallel": {"vocabulary_multiple": 4},
    }
    found = plan(experts.Net(layer), spec).diagnostics
    assert all(row.level == "info" for row in found if "experts" in row.what)
    return [row.what for row in found if "experts" in row.what]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "tp", "dispatch", "how"),
    [
        (experts.stacked, 1, "every token, weighted", "all of them"),
        (experts.stacked, 2, "every token, weighted", "some of them"),
        (experts.masks, 2, "the rows that chose it", "a shard of each"),
    ],
)
def test_a_layer_of_experts_has_a_row(way: experts.Way, tp: int, dispatch: str, how: str):
    (row,) = rows(experts.Layer(way), tp=tp)
    assert row == f"4 experts, 2 per token ({dispatch}): every rank holds {how}"


def test_what_is_not_taken_for_experts_has_a_row_with_the_reason():
    (row,) = rows(experts.Differing(), tp=2)
    assert row == (
        "this looks like a router of experts, but is not planned as one: "
        "the branches of its 4 numbers differ from each other"
    )


def test_a_dense_layer_has_no_row():
    assert rows(experts.SoftMixture(), tp=2) == []
