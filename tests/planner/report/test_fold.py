"""Folding names: ranges that read back to exactly the rows that went in."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from planner.report.section import fold, ranges


def folded(*names: str) -> list[tuple[str, int]]:
    return [(f.name, len(f.rows)) for f in fold(names, str, lambda _: None)]


def read_back(name: str) -> list[str]:
    """Every name that a folded one stands for."""
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [[part] if i % 2 == 0 else _numbers(part) for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    bounds = [run.split("..") for run in text.split(",")]
    return [str(n) for run in bounds for n in range(int(run[0]), int(run[-1]) + 1)]


def test_blocks_fold_to_one_row_with_the_range():
    assert folded("wte", "h.0.w", "h.0.b", "h.1.w", "h.1.b", "h.2.w", "h.2.b", "ln") == [
        ("wte", 1),
        ("h.{0..2}.w", 3),
        ("h.{0..2}.b", 3),
        ("ln", 1),
    ]


def test_gaps_and_pairs_are_listed():
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0..3,7,9,10"


def test_two_numbers_fold_only_where_they_form_a_full_rectangle():
    assert folded("b.0.e.0", "b.0.e.1", "b.1.e.0", "b.1.e.1") == [("b.{0,1}.e.{0,1}", 4)]
    assert folded("b.0.e.0", "b.0.e.1", "b.1.e.0") == [("b.{0,1}.e.0", 2), ("b.0.e.1", 1)]


def test_rows_that_differ_do_not_fold():
    rows = [("h.0", "a"), ("h.1", "b"), ("h.2", "a")]
    assert [f.name for f in fold(rows, lambda r: r[0], lambda r: r[1])] == ["h.{0,2}", "h.1"]


def test_words_after_the_name_must_be_equal():
    assert folded("h.0   (a.py:1)", "h.1   (a.py:1)", "h.2   (a.py:2)") == [
        ("h.{0,1}   (a.py:1)", 2),
        ("h.2   (a.py:2)", 1),
    ]


def test_a_name_given_twice_does_not_hide_in_a_range():
    assert folded("h.0", "h.0", "h.1") == [("h.0", 2), ("h.1", 1)]


@given(
    st.sets(
        st.lists(st.sampled_from(["0", "1", "2", "5", "w", "h"]), min_size=1, max_size=4).map(".".join), max_size=20
    )
)
def test_folded_names_read_back_to_the_names_that_went_in(names: set[str]):
    back = [name for f in fold(sorted(names), str, lambda _: None) for name in read_back(f.name)]
    assert sorted(back) == sorted(names)
