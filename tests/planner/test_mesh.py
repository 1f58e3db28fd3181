"""Rank groups: every layout of the oracle, every error, and the properties that hold for any mesh."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.fold import LOOP, Fold, V, rank_of, stage_of, stages_of
from planner.mesh import Mesh, all_groups
from planner.ranks import DENSE_TOKENS, EXPERT_TOKENS, RankGenerator, masked_groups
from planner.tables.tables import decode, encode
from tests.tools.paths import ORACLES

pytestmark = pytest.mark.check

ORACLE = json.loads((ORACLES / "rank_groups.json").read_text())
ARGUMENTS = ("tp", "pp", "cp", "ep", "etp", "order")

# Splitting the optimizer's dp group in instances does not exist here, so its divisibility error does not either.
ERRORS = [case for case in ORACLE["errors"] if "DistOpt" not in case["error"]["message"]]
MESH_ERRORS = [case for case in ERRORS if "rank_generator" not in case]

EXPECTED_ERRORS = {
    9: "4 ranks apart for the dense layers, but 2 apart for the experts: the pp groups differ",
    22: "does not end in pp, so that dp (= 4) and edp (= 1) must be equal",
    37: "4 ranks apart for the dense layers, but 1 apart for the experts: the pp groups differ",
    46: "1 ranks apart for the dense layers, but 2 apart for the experts: the pp groups differ",
    57: "8 ranks apart for the dense layers, but 4 apart for the experts: the pp groups differ",
    59: "4 ranks apart for the dense layers, but 1 apart for the experts: the pp groups differ",
    73: "world size 8 is not divisible by tp·cp·pp = 3·1·1 = 3",
    75: "world size 8 is not divisible by etp·ep·pp = 1·3·1 = 3",
    77: "order `tp-dp` lacks the axis pp of size 2 for the dense layers",
    79: "order `tp-pp-dp` lacks the axis ep of size 2 for the experts",
    83: "order `tp-xx-dp-pp` names an unknown axis `xx`",
}


def mesh_of(case: dict) -> Mesh:
    return Mesh.from_world_size(case["world_size"], **{name: case[name] for name in ARGUMENTS})


def shifted(groups: dict[str, list[list[int]]], offset: int) -> dict[str, list[list[int]]]:
    return {token: [[rank + offset for rank in group] for group in rows] for token, rows in groups.items()}


@pytest.mark.parametrize("case", ORACLE["layouts"], ids=lambda case: str(case["id"]))
def test_groups_equal_the_oracle(case):
    mesh = mesh_of(case)
    ours = {owner: shifted(groups, case["rank_offset"]) for owner, groups in all_groups(mesh).items()}
    assert ours == {"dense": case["dense"], "expert": case["expert"]}
    assert (mesh.dp, mesh.etp, mesh.edp) == (case["dp"], case["etp_effective"], case["edp"])


@pytest.mark.parametrize("case", MESH_ERRORS, ids=lambda case: str(case["id"]))
def test_layouts_that_the_oracle_rejects_say_why_and_how_to_fix(case):
    with pytest.raises(PlanError) as error:
        mesh_of(case)
    assert EXPECTED_ERRORS[case["id"]] in error.value.what
    assert str(error.value.where).startswith("mesh")
    assert error.value.fix


def test_dp_groups_of_tp4_pp2_dp2_stride_by_four():
    mesh = Mesh(tp=4, pp=2, dp=2)
    assert mesh.groups("dp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert mesh.groups("pp")[:2] == [[0, 8], [1, 9]]


def test_expert_groups_of_etp1_ep4_pp2_on_16_ranks():
    mesh = Mesh.from_world_size(16, tp=4, pp=2, etp=1, ep=4)
    assert mesh.edp == 2
    assert mesh.expert.groups("ep")[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.expert.groups("dp")[:2] == [[0, 4], [1, 5]]


def test_etp_left_out_is_tp():
    assert Mesh(tp=4).etp == 4
    assert Mesh.from_world_size(8, tp=4).etp == 4
    assert Mesh.from_world_size(8, tp=4, etp=1).etp == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"vpp": 2}, "there is no pipeline (pp = 1)"),
        ({"tp": 0}, "tp = 0 is not a positive whole number"),
        ({"dp": 1.5}, "dp = 1.5 is not a positive whole number"),
        ({"order": "tp-dp-tp-pp"}, "names the axis tp more than once"),
        ({"tp": 4, "etp": 1, "order": "tp-pp"}, "lacks the axis dp of size 4 for the experts"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(arguments, what):
    with pytest.raises(PlanError) as error:
        Mesh(**arguments)
    assert what in error.value.what
    assert error.value.fix


@pytest.mark.parametrize(("row", "what"), [({"edp": 3}, "edp = 3"), ({"world_size": 8}, "tp·cp·dp·pp = 4")])
def test_the_row_of_a_saved_plan_must_agree_with_its_sizes(row, what):
    saved = encode(Mesh(tp=2, pp=2, etp=1))
    assert list(saved) == ["tp", "pp", "vpp", "dp", "cp", "ep", "etp", "edp", "world_size", "order", "fold", "shard"]
    assert decode(Mesh, saved, "plan.mesh") == Mesh(tp=2, pp=2, etp=1)
    with pytest.raises(PlanError, match="the plan contradicts itself") as error:
        decode(Mesh, {**saved, **row}, "plan.mesh")
    assert what in error.value.what
    assert error.value.fix


def test_an_unknown_axis_names_the_nearest_known_one():
    with pytest.raises(PlanError) as error:
        Mesh(order="tp-cp-ep-ddp-pp")
    assert "did you mean dp?" in error.value.fix
    with pytest.raises(PlanError, match="group `ep` names an unknown axis `ep`"):
        Mesh().groups("ep")


@st.composite
def meshes(draw) -> Mesh:
    """Any valid mesh: orders that end in pp, and, where etp = tp and cp = ep = 1, any order at all."""
    size = st.integers(1, 3)
    tp, pp, dp = draw(size), draw(size), draw(size)
    head = "-".join(draw(st.permutations(["tp", "cp", "ep", "dp"])))
    if draw(st.booleans()):
        return Mesh(tp=tp, pp=pp, dp=dp, order="-".join(draw(st.permutations(["tp", "dp", "pp"]))))
    cp = draw(size)
    divisors = [n for n in range(1, tp * cp * dp + 1) if tp * cp * dp % n == 0]
    etp = draw(st.sampled_from(divisors))
    ep = draw(st.sampled_from([n for n in divisors if tp * cp * dp % (n * etp) == 0]))
    return Mesh(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, order=f"{head}-pp")


@settings(deadline=None)
@given(meshes())
def test_rank_and_coordinate_are_inverse(mesh):
    for generator in (mesh.dense, mesh.expert):
        coordinates = [generator.coordinate(rank) for rank in range(mesh.world_size)]
        assert [generator.rank_of(coordinate) for coordinate in coordinates] == list(range(mesh.world_size))
        assert len({tuple(c.items()) for c in coordinates}) == mesh.world_size
    assert [mesh.rank_of(**mesh.coordinate(rank)) for rank in range(mesh.world_size)] == list(range(mesh.world_size))


@settings(deadline=None)
@given(meshes())
def test_groups_of_every_token_tile_the_ranks(mesh):
    for groups in (g for tokens in all_groups(mesh).values() for g in tokens.values()):
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        assert len({len(group) for group in groups}) == 1


@settings(deadline=None)
@given(meshes())
def test_members_of_a_group_differ_only_in_the_axes_of_its_token(mesh):
    for generator, tokens in ((mesh.dense, DENSE_TOKENS), (mesh.expert, EXPERT_TOKENS)):
        for token in tokens:
            inside = token.split("-")
            for group in generator.groups(token):
                coordinates = [generator.coordinate(rank) for rank in group]
                others = {tuple(i for axis, i in c.items() if axis not in inside) for c in coordinates}
                assert len(others) == 1
                assert len(group) == math.prod(
                    n for axis, n in zip(generator.axes, generator.sizes, strict=True) if axis in inside
                )
                assert all(generator.group_of(token, rank) == group for rank in group)


@settings(deadline=None)
@given(meshes())
def test_a_rank_s_place_among_those_that_share_parameters_is_its_place_in_their_group(mesh):
    for rank in range(min(mesh.world_size, 64)):
        assert mesh.place(rank)[mesh.data_axis] == mesh.dense.group_of(mesh.data_axis, rank).index(rank)
        assert mesh.size(mesh.data_axis) == mesh.dp * mesh.cp


@settings(deadline=None)
@given(meshes())
def test_both_generators_have_the_same_pp_groups(mesh):
    assert mesh.groups("pp") == mesh.expert.groups("pp")


def test_16384_ranks_have_all_their_groups():
    mesh = Mesh.from_world_size(16384, tp=8, pp=16, cp=2, ep=8, etp=1)
    assert (mesh.dp, mesh.edp) == (64, 128)
    groups = all_groups(mesh)
    assert len(groups["dense"]["tp"]) == 2048
    assert groups["dense"]["pp"][-1] == list(range(1023, 16384, 1024))


# ---- the rank generator: groups over masked axes equal the oracle's, and what cannot be laid out is refused


def test_masked_groups_equal_the_oracle():
    for case in ORACLE["raw_masked"]:
        assert masked_groups(case["parallel_size"], case["mask"]) == case["groups"]


def test_cp_and_ep_cannot_stand_in_one_generator():
    (case,) = [case for case in ORACLE["errors"] if "rank_generator" in case]
    with pytest.raises(PlanError, match="cp = 2 and ep = 2 are in one rank generator"):
        RankGenerator.of("tp-cp-ep-dp-pp", case["rank_generator"])


# ---- where stages live: each on one rank, as one of its chunks, and the two stages at a turn of the v on one rank


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
