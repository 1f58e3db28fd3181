"""Every token but the first is scored once, behind as much of the text as a window that has it can hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import PlanError
from runtime.evaluation.rows import Windows


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
        (9, 6, "a window predicts 5 tokens, a stride of 6 would skip some"),
    ],
)
def test_what_cannot_be_scored_is_refused(num: int, stride: int, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        Windows(np.arange(num), 6, stride, "text")
