"""Experts with axes of their own: which ranks hold, count and share what, and that a saved plan still knows it."""

from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod

import pytest

from passes.blocks.blocks import find_blocks
from passes.lowering import Lowering
from passes.moe.find import find_experts
from passes.moe.layers import ExpertPart
from passes.partition.loss.shares import share_loss
from passes.types.types import V
from planner import Plan, PlanError
from planner.capture.export import capture
from planner.decisions import Decisions
from planner.mesh import Mesh
from planner.pipeline.stages import assign_stages
from planner.placement.candidates import Cutting
from planner.placement.decide import typing_problem
from planner.sharding.boxes import Part
from planner.sharding.parameters import ParameterPlan, local_parameter, parameters_of_rank
from planner.sharding.shards import Shards, decide_shards
from planner.spec.spec import Spec
from tests.models import experts, hugging_face, plannable
from tests.tools.captures import plan_again

LAYOUTS = [
    {"dp": 4, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    {"tp": 2, "dp": 2, "ep": 2, "pp": 2},
    {"dp": 4, "etp": 2},
    {"tp": 2, "dp": 2, "ep": 4, "etp": 1},
]


def spec_of(mesh: dict[str, int], length: int, high: int) -> dict:
    ids = {"shape": [length], "dtype": "int64", "high": high}
    return {
        "mesh": mesh,
        "batch": {"global": 16, "micro": 2},
        "inputs": {"input_ids": ids, "labels": ids},
        "tensor_parallel": {"vocabulary_multiple": 4},
        "optimizer": {"alignment": "none"},
    }


@cache
def mixtral(layout: int) -> Plan:
    given = spec_of(LAYOUTS[layout], hugging_face.LENGTH, hugging_face.VOCABULARY)
    return plan_again(hugging_face.build("mixtral"), given)


@cache
def looped(ep: int, dp: int, etp: int = 1) -> tuple[Decisions, Shards]:
    """Experts as a loop over modules leaves them, each with parameters of its own, whole on every etp rank."""
    given = experts.batch()
    program = capture(experts.Net(experts.Layer(experts.masks)), given)
    terms, mesh = share_loss(program, 8, lambda _: program), Mesh(dp=dp, ep=ep, etp=etp)
    blocks = find_blocks(program)
    placements, stages = typing_problem(program, blocks, Cutting(1)).decided(), assign_stages(program, blocks, Mesh())
    found = find_experts(program)
    lowering = Lowering(program, placements, stages, mesh, found, denominators=tuple(terms.denominators))
    decisions = Decisions(lowering, blocks, terms, mesh, 0)
    spec = Spec.load(spec_of({"dp": dp, "ep": ep}, experts.LENGTH, experts.VOCABULARY))
    return decisions, decide_shards(spec, decisions)


def counted(decisions: Decisions) -> Counter[str]:
    """Elements that the ranks count in the norm, of one rank of each set that shares them."""
    mesh, found = decisions.mesh, Counter[str]()
    for rank in range(mesh.world_size):
        place = mesh.place(rank)
        for p in parameters_of_rank(decisions, place["pp"], place):
            if place[p.reduced_over] == 0 and p.counted:
                found[p.fqn] += prod(p.shape)
    return found


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_every_element_is_counted_once_for_every_folding(layout):
    made = mixtral(layout)
    assert made.decisions is not None
    assert counted(made.decisions) == {p.name: p.num_elements for p in made.parameters}


@pytest.mark.thorough
@pytest.mark.parametrize("etp", [1, 2])
def test_every_element_of_experts_on_their_own_is_counted_once(etp):
    decisions, _ = looped(2, 4, etp)
    program = decisions.program
    sizes = {fqn: program.node(name).meta["val"].numel() for name, fqn in program.parameters.items()}
    assert counted(decisions) == sizes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_what_a_rank_has_is_what_the_row_says(layout):
    made = mixtral(layout)
    assert made.decisions is not None
    rows = {row.name: row for row in made.parameters}
    for rank in range(made.mesh.world_size):
        place = made.mesh.place(rank)
        for p in parameters_of_rank(made.decisions, place["pp"], place):
            row = rows[p.fqn]
            assert (p.shape, p.axis, p.expert, p.placement.sizes) == (
                row.local_shape,
                row.axis,
                row.expert,
                row.placement.sizes,
            )


def rows_of_experts(layout: int) -> dict[str, ParameterPlan]:
    return {row.name.rpartition(".")[2]: row for row in mixtral(layout).parameters if row.style == "expert"}


def test_a_row_says_what_ep_and_etp_cut():
    rows = rows_of_experts(2)  # tp 2, ep 2, etp 2
    assert {name: row.local_shape for name, row in rows.items()} == {
        "gate_up_proj": (2, 64, 32),
        "down_proj": (2, 32, 32),
    }
    assert rows["down_proj"].reason == "4 experts over ep 2: 2 on a rank; width over etp 2"
    assert rows["gate_up_proj"].reason.startswith(
        "4 experts over ep 2: 2 on a rank; width over etp 2; each of its 2 fused segments"
    )
    assert rows_of_experts(0)["down_proj"].reason == "4 experts over ep 2: 2 on a rank"
    text = mixtral(2).describe()
    assert "dim 0 over ep, dim 2" in text
    assert "dim 0 over ep, dim 1: 64+64" in text
    assert "(edp)" in text


def test_a_loaded_plan_knows_what_a_rank_holds(tmp_path):
    made = mixtral(2)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == made
    down = next(row for row in loaded.parameters if row.name.endswith("0.mlp.experts.down_proj"))
    assert (down.expert, down.axis) == (ExpertPart(4, 0), "etp")
    assert [b.reduced_over for b in loaded.optimizer.buffers] == ["dp", "edp", "dp", "edp"]


def test_experts_share_their_buffers_over_edp_and_all_else_over_dp():
    made = mixtral(0)  # dp 4, ep 2: edp 2
    buffers = made.to_run()[1].buffers
    assert [(b.reduced_over, b.layout.num_ranks) for b in buffers] == [("dp", 4), ("edp", 2)]
    assert all(("experts" in p.fqn) == (b.reduced_over == "edp") for b in buffers for p in b.parameters)
    assert made.memory[0].optimizer == sum(2 * 4 * b.layout.num_elements // b.layout.num_ranks for b in buffers)
    step = [(row.kind, row.axis) for row in made.collectives if row.per == "step"]
    assert step == [
        ("reduce_scatter", "dp"),
        ("all_gather", "dp"),
        ("reduce_scatter", "edp"),
        ("all_gather", "edp"),
        ("all_reduce", "world"),
    ]


def test_one_edp_rank_shares_with_nobody():
    made = mixtral(4)  # tp 2, dp 2, ep 4: edp 1
    assert not [row for row in made.collectives if row.axis == "edp"]
    assert {b.reduced_over: b.layout.num_ranks for b in made.to_run()[1].buffers} == {"dp": 2, "edp": 1}


# ---- of one expert alone


def numbers(names: list[str]) -> set[str]:
    return {name.split(".")[2] for name in names if name.startswith("layer.experts.")}


def test_an_ep_rank_holds_its_own_experts_and_all_else():
    decisions, _ = looped(2, 4)
    held = {
        ep: [p.fqn for p in parameters_of_rank(decisions, 0, decisions.mesh.place(0) | {"ep": ep})] for ep in (0, 1)
    }
    assert [numbers(held[ep]) for ep in (0, 1)] == [{"0", "1"}, {"2", "3"}]
    shared = [n for n in held[0] if not numbers([n])]
    assert shared == [n for n in held[1] if not numbers([n])]
    assert "layer.gate.weight" in shared


def test_buffers_of_another_ep_rank_have_its_names_in_the_same_places():
    _, shards = looped(2, 4)
    first, second = shards.buffers_of_rank(0, 0), shards.buffers_of_rank(0, 1)
    assert [b.reduced_over for b in first] == ["dp", "edp"]
    assert first[0] == second[0]
    names = [[p.fqn for p in buffers[1].parameters] for buffers in (first, second)]
    assert [numbers(of_rank) for of_rank in names] == [{"0", "1"}, {"2", "3"}]
    assert [s.world for s in first[1].layout.slots] == [s.world for s in second[1].layout.slots]


def test_every_trainable_parameter_has_a_dtype_for_its_sums():
    decisions, shards = looped(2, 4)
    assert set(shards.buffer_of(2)) == set(decisions.program.parameters.values())


def test_without_axes_of_their_own_experts_are_as_all_else():
    decisions, shards = looped(1, 4)
    assert not decisions.expert_parts
    assert [b.reduced_over for b in shards.buffers] == ["dp"]
    assert {p.axis for b in shards.buffers for p in b.parameters} == {"tp"}


def test_what_is_of_one_expert_is_not_held_elsewhere_though_the_graph_has_it():
    decisions, _ = looped(2, 4)
    name = next(n for n, part in decisions.expert_parts.items() if part.number == 3)
    local = local_parameter(decisions, decisions.program.node(name), 0, decisions.mesh.place(0) | {"ep": 1})
    assert local.expert == ExpertPart(4, number=3)
    assert local.shape == local.global_shape


# ---- rows that contradict themselves

STACK = {"name": "w", "dtype": "float32", "style": "expert", "stages": (0,), "reason": ""}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"style": "column"}, "is of experts and has the style column"),
        ({"num_experts": 4}, "counts no 4 experts"),
        ({"num_experts": 0}, "is of no expert and has a place among them"),
        ({"expert_number": 1}, "must be a stack of experts, or of one"),
        ({"local_shape": (4, 3, 2)}, "is whole and yet cut"),
    ],
)
def test_a_row_of_experts_is_checked(changes, what):
    row = ParameterPlan.of(Part(V(2, 4), 2, 0, ExpertPart(8, 0), 2, 0), shape=(8, 5, 4), **STACK)
    assert row.local_shape == (4, 5, 2)
    with pytest.raises(PlanError, match=what):
        replace(row, **changes)


@pytest.mark.parametrize("etp", [1, 2])
def test_experts_that_train_on_one_ep_rank_alone_exchange_what_the_others_do(etp: int) -> None:
    """A row is of all ranks of a stage."""
    spec = plannable.spec_of("loop of experts", mesh={"dp": 4, "ep": 2, "etp": etp})
    rows = []
    for frozen in (False, True):
        model = plannable.build("loop of experts")
        for parameter in model.get_submodule("layer.experts.3").parameters():
            parameter.requires_grad_(not frozen)
        made = plan_again(model, spec)
        rows.append([row for row in made.collectives if row.per == "microbatch"])
    assert rows[0] == rows[1]
