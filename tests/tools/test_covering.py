"""A covering array has every pair that its cases have, in fewer cases, whatever their order."""

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.tiers import cover, sample

pytestmark = pytest.mark.check
VALUES = st.tuples(*(st.integers(0, most) for most in (3, 2, 4, 1)))


def named(rows: list[tuple[int, ...]]) -> dict[str, list[str]]:
    return {str(row): [f"{column}={value}" for column, value in enumerate(row)] for row in rows}


@given(st.lists(VALUES, unique=True), st.integers(1, 4), st.randoms())
def test_values_that_meet_in_a_case_meet_in_a_chosen_one(rows, strength, random):
    cases = named(rows)
    chosen = cover(cases, strength)
    pairs = [{pair for case in ids for pair in combinations(cases[case], strength)} for ids in (cases, chosen)]
    assert pairs[0] == pairs[1]
    shuffled = list(cases.items())
    random.shuffle(shuffled)
    assert cover(dict(shuffled), strength) == chosen


def test_pairs_of_a_product_need_few_of_its_cases():
    cases = named(list(product(range(3), repeat=4)))
    assert len(cases) == 81
    assert len(cover(cases, 2)) <= 13
    assert len(cover(cases, 1)) == 3
    assert cover(cases, 4) == set(cases)


def test_more_that_stands_by_itself_is_in_a_chosen_case():
    cases = {f"{way} {layout}": [way, *layout] for way in "ab" for layout in ("x", "y", "xy")}
    assert len(cover(cases, 2)) == 2
    chosen = cover(cases, 2, [[name.split()[1]] for name in cases])
    assert {name.split()[1] for name in chosen} == {"x", "y", "xy"}
    assert len(chosen) == 3


def test_a_case_of_no_values_is_left_out_only_beside_others():
    assert cover({}, 2) == set()
    assert cover({"a": ["x"], "b": ["y"]}, 2) == {"a", "b"}


@given(st.sets(st.text()), st.integers(1, 5), st.text())
def test_a_sample_keeps_most_of_its_ids_where_another_is_added(ids, most, more):
    chosen = sample(ids, most)
    assert chosen <= ids
    assert len(chosen) == min(most, len(ids))
    assert len(chosen - sample(ids | {more}, most)) <= 1
