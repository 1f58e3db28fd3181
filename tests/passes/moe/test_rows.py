"""A plan says which layers hold experts, and that they are cut as other matrices are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from passes.moe.domain import axis_of
from passes.moe.find import find_experts
from passes.moe.open import open_experts
from planner import plan
from planner.mesh import Mesh
from tests.models import experts, routers, stacked_experts
from tests.models.adapted_experts import LowRank, adapted
from tests.tools.expert_programs import captured
from tests.tools.simulated_mesh import equals_one_process


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


# ---- stacks of all experts, on meshes without ep

FEW_CHOSEN = {"num_experts": 8, "top_k": 2}


def of(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return experts.Net(layer()).double()

    return make


def batch_of(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randint(experts.VOCABULARY, (rows, 12), generator=generator) for n in ("input_ids", "labels")}


@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, pytest.param({"cp": 2, "dp": 2}, marks=pytest.mark.thorough)], ids=str)
@pytest.mark.parametrize(
    "made",
    [
        lambda: stacked_experts.Stacks(stacked_experts.biased, **FEW_CHOSEN),
        lambda: adapted(stacked_experts.Stacks(stacked_experts.biased, **FEW_CHOSEN), LowRank),
        pytest.param(lambda: experts.Layer(experts.copied, **FEW_CHOSEN), marks=pytest.mark.thorough),
    ],
    ids=["biased", "adapted", "copied"],
)
def test_stacks_compute_the_rows_that_chose_them(made: Any, mesh: dict[str, int]):
    (layer,) = equals_one_process(of(made), batch_of(4), mesh).plan.experts
    assert layer.how == "the rows that chose it"


def test_stacks_that_are_not_opened_say_why():
    half = rows(experts.Layer(experts.stacked))
    assert half == ["4 experts, 2 per token (every token, weighted): every rank holds all of them"]
    (_, why) = rows(stacked_experts.Stacks(stacked_experts.over_experts, **FEW_CHOSEN))
    assert why == (
        "each of the 8 experts computes every token, 4× the work: "
        "the result of one token of one expert depends on others"
    )


class Twice(nn.Module):
    """Stacks that two routers share; the second reads them so that the results of experts are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = stacked_experts.Stacks(stacked_experts.biased, **FEW_CHOSEN)
        self.gate, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        probs, chosen = self.gate(self.norm(x)).softmax(-1).topk(2, -1)
        return x + stacked_experts.over_experts(self.first, self.norm(x), probs, chosen)


def test_a_layer_that_is_not_opened_leaves_the_marks_of_others():
    ran = equals_one_process(of(Twice), batch_of(4), {"tp": 2})
    assert [row.how for row in ran.plan.experts] == ["the rows that chose it", "every token, weighted"]
    program, _ = captured(of(Twice), batch_of(4))
    open_experts(program, find_experts(program), Mesh())
    assert {axis_of(node) for node in program.graph.graph.nodes} == {"tp"}


# ---- experts that no router was found for


@pytest.mark.parametrize("way", [routers.by_threshold, routers.in_two_levels], ids=lambda way: way.__name__)
def test_a_choice_without_indices_is_refused_at_the_experts(way: Any):
    program, _ = captured(of(lambda: routers.Unrouted(way)))
    with pytest.raises(PlanError) as error:
        open_experts(program, find_experts(program), Mesh(dp=2, ep=2))
    assert error.value.what == (
        "ep = 2, etp = 1: the model has no experts with a router: no topk, sort, max or argmax of 4 scores gives the "
        "indices that choose among these products"
    )
    assert error.value.where.module == "layer.experts.0.0"
    assert error.value.fix == "choose by the indices of one topk of 4 scores; or set ep: 1 and remove etp"


def test_a_model_without_experts_is_refused_at_the_key():
    program, _ = captured(lambda: experts.Net(nn.Linear(8, 8)))
    with pytest.raises(PlanError) as error:
        open_experts(program, find_experts(program), Mesh(dp=2, ep=2))
    assert (error.value.what, error.value.where) == (
        "ep = 2, etp = 1: the model has no experts with a router",
        "mesh.ep",
    )
