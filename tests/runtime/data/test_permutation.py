"""A permutation that is computed place by place is one: every value once, another for every key."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.token_batches import Permutation


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_every_value_comes_once(size: int, seed: int, epoch: int) -> None:
    found = Permutation(size, (seed, epoch))(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(2**40, 2**62), st.lists(st.integers(0, 2**40 - 1), min_size=2, max_size=20, unique=True))
def test_places_of_a_huge_one_stay_apart_and_inside(size: int, places: list[int]) -> None:
    found = Permutation(size, (1, 2))(np.array(places)).tolist()
    assert len(set(found)) == len(places)
    assert all(0 <= value < size for value in found)


def test_a_place_is_the_same_alone_and_among_others() -> None:
    shuffled = Permutation(1000, (3, 4))
    assert [int(shuffled(np.array([place]))[0]) for place in range(50)] == shuffled(np.arange(50)).tolist()


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(Permutation(100, key)(np.arange(100)).tolist()) for key in ((1, 0), (1, 1), (2, 0), (0, 1))}
    assert len(orders) == 4


def test_the_order_is_the_same_on_every_machine() -> None:
    """What a run saw before a resume must be what it would see now."""
    assert Permutation(12, (1234, 0))(np.arange(12)).tolist() == [0, 2, 8, 9, 7, 10, 3, 6, 1, 5, 4, 11]


def test_neighbours_are_shuffled_well() -> None:
    """Of a good shuffle, the correlation of place and value is about 1/sqrt(n)."""
    found = Permutation(10_000, (1, 1))(np.arange(10_000))
    assert abs(np.corrcoef(np.arange(10_000), found)[0, 1]) < 0.05
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.05
