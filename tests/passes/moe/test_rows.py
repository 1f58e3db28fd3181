"""A plan says which layers hold experts, and that they are cut as other matrices are."""

from typing import Any

import pytest
import torch
from torch import nn

from planner import plan
from tests.models import experts, stacked_experts
from tests.models.adapted_experts import LowRank, adapted
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
    def make() -> nn.Module:
        torch.manual_seed(3)
        return experts.Net(made()).double()

    generator = torch.Generator().manual_seed(1)
    batch = {n: torch.randint(experts.VOCABULARY, (4, 12), generator=generator) for n in ("input_ids", "labels")}
    (layer,) = equals_one_process(make, batch, mesh).plan.experts
    assert layer.how == "the rows that chose it"


def test_stacks_that_are_not_opened_say_why():
    half = rows(experts.Layer(experts.stacked))
    assert half == ["4 experts, 2 per token (every token, weighted): every rank holds all of them"]
    (_, why) = rows(stacked_experts.Stacks(stacked_experts.over_experts, **FEW_CHOSEN))
    assert why == (
        "each of the 8 experts computes every token, 4× the work: "
        "the result of one token of one expert depends on others"
    )
