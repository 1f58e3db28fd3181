"""Where stages live: each on one rank, as one of its chunks, and the two stages at a turn of the v on one rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.fold import LOOP, Fold, V, rank_of, stage_of, stages_of
from planner.mesh import Mesh
from planner.tables.tables import decode, encode

pytestmark = pytest.mark.check


@pytest.mark.parametrize(
    ("fold", "rows"),
    [
        (LOOP, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (V, [(0, 7), (1, 6), (2, 5), (3, 4)]),
    ],
)
def test_the_stages_of_four_ranks(fold: Fold, rows: list[tuple[int, int]]) -> None:
    mesh = Mesh(pp=4, vpp=2, fold=fold)
    assert [mesh.stages_of(rank) for rank in range(4)] == rows
    assert [mesh.pp_rank_of(0), mesh.pp_rank_of(7)] == ([0, 3] if fold == LOOP else [0, 0])


@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([LOOP, V]))
def test_every_stage_is_one_chunk_of_one_rank(pp: int, vpp: int, fold: Fold) -> None:
    places = [(rank, chunk) for rank in range(pp) for chunk in range(vpp)]
    stages = [stage_of(*place, pp, fold) for place in places]
    assert sorted(stages) == list(range(pp * vpp))
    assert [(rank_of(s, pp, fold), s // pp) for s in stages] == places
    assert stages == [s for rank in range(pp) for s in stages_of(rank, pp, pp * vpp, fold)]


@given(st.integers(2, 9), st.integers(1, 5))
def test_a_v_turns_on_one_rank_and_a_loop_never_does(pp: int, vpp: int) -> None:
    for stage in range(pp * vpp - 1):
        is_turn = (stage + 1) % pp == 0
        assert (rank_of(stage, pp, V) == rank_of(stage + 1, pp, V)) is is_turn
        assert rank_of(stage, pp, LOOP) != rank_of(stage + 1, pp, LOOP)


def test_a_saved_mesh_says_how_it_is_folded() -> None:
    mesh = Mesh(pp=2, vpp=2, fold=V)
    assert decode(Mesh, encode(mesh), "plan.mesh") == mesh
    with pytest.raises(PlanError, match=r"plan\.mesh\.fold must be one of loop, v, not 'w'"):
        decode(Mesh, {**encode(mesh), "fold": "w"}, "plan.mesh")
