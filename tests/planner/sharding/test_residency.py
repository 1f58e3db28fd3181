"""The moves of weights in shards: nothing that is needed is missing, and no more is whole than is asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.sharding.residency import Moves, Residency
from tests.tools.examples import examples

UNITS = st.tuples(st.integers(0, 1), st.integers(0, 3))
NEEDS = st.lists(st.tuples(st.lists(UNITS, min_size=1, max_size=3), st.lists(UNITS, max_size=2)), max_size=20)


@examples(200)
@given(needs=NEEDS, reshards=st.booleans())
def test_each_need_leaves_its_units_whole_and_frees_all_others(needs, reshards: bool):
    residency, whole = Residency(reshards=reshards), set()
    for units, ahead in needs:
        moves = residency.need(units, ahead)
        assert whole.issuperset(moves.freed)
        assert whole.isdisjoint(moves.gathered)
        whole = whole - set(moves.freed) | set(moves.gathered)
        assert whole == set(residency.whole)
        wanted = {*units, *ahead}
        assert whole == wanted if reshards else whole >= wanted
        assert not moves.freed or reshards
    assert set(residency.end().freed) == whole
    assert residency.end() == Moves()


def test_a_forward_and_its_backward_gather_the_last_block_once():
    residency, gathered = Residency(reshards=True), []
    for units, ahead in (((1,), (2,)), ((2,), (3,)), ((3,), ()), ((3,), (2,)), ((2,), (1,)), ((1,), ())):
        of = ([(0, n) for n in units], [(0, n) for n in ahead])
        gathered += [bucket for _, bucket in residency.need(*of).gathered]
    assert gathered == [1, 2, 3, 2, 1]
