"""Which tokens a rank of cp holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from passes.partition.sequence import facts
from tests.tools import zigzag


@given(st.integers(1, 9), st.integers(1, 5))
def test_the_ranks_hold_each_token_once_and_each_sees_as_many(cp, length):
    size = 2 * cp * length
    held = [zigzag.places(size, cp, rank) for rank in range(cp)]
    assert sorted(place for of_rank in held for place in of_rank) == list(range(size))
    assert all(facts.chunks(cp, facts.owner(cp, c)[0])[facts.owner(cp, c)[1]] == c for c in range(2 * cp))
    seen = [sum(place + 1 for place in of_rank) for of_rank in held]
    assert seen == [zigzag.pairs(size, cp, rank) for rank in range(cp)]
    assert len(set(seen)) == 1


def test_what_a_rank_holds_is_written_as_in_the_field():
    assert [facts.rows(16, 2, rank) for rank in range(2)] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]
