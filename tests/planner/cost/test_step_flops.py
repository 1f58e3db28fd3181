"""Model FLOPs of a step: products of forward and backward of one device, whether or not a cluster is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import plan
from planner.cost.planned import PlannedSeconds
from planner.spec.spec import Spec
from runtime.report.log import Planned
from tests.models import experts, sorted_experts
from tests.tools.paths import ROOT


class Two(nn.Module):
    """[b, 6, 8] → [b, 6, 16] → [b, 6, 4]; nothing asks for the gradient of ``x``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).pow(2).mean()


def flops_of(model: nn.Module, spec: Any) -> tuple[float, Planned]:
    decided = plan(model, spec)
    bare = Spec.load({**decided.spec, "cluster": None})
    return PlannedSeconds(decided.lowered(), bare).step_flops(decided.schedule), Planned.of(decided)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"dp": 4}])
def test_a_linear_takes_one_product_forward_and_one_for_each_gradient_that_is_asked_for(mesh):
    inputs = {"x": {"shape": [6, 8], "dtype": "float32"}}
    flops, planned = flops_of(Two(), {"mesh": mesh, "batch": {"global": 8, "micro": 2}, "inputs": inputs})
    rows = 8 * 6 / mesh.get("dp", 1)
    assert flops == 2 * rows * 8 * 16 * 2 + 2 * rows * 16 * 4 * 3
    assert planned == Planned(flops, 0.0, 0.0)


@pytest.mark.thorough
def test_what_is_computed_again_does_not_count_and_a_cluster_names_the_peak():
    from examples.gpt import GPT

    spec = {
        "mesh": {"tp": 2, "pp": 2},
        "batch": {"global": 8, "micro": 2},
        "inputs": {"input_ids": {"shape": [32], "dtype": "int64", "high": 256}, "targets": {"like": "input_ids"}},
    }
    bare, planned = flops_of(GPT(), spec)
    again, _ = flops_of(GPT(), {**spec, "recompute": "full"})
    named, priced = flops_of(GPT(), {**spec, "cluster": str(ROOT / "specs" / "clusters" / "h200.yaml")})
    assert bare == again == named == priced.flops == planned.flops
    assert (planned.peak, priced.peak > 1e12) == (0.0, True)
    assert planned.bubble == priced.bubble == pytest.approx(1 / 5)


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 4, "etp": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("way", [experts.masks, experts.stacked, sorted_experts.by_places], ids=lambda w: w.__name__)
def test_experts_on_several_ranks_multiply_as_many_rows_as_those_on_one(way, mesh):
    """Every expert gets rows of all ranks of ep, written as branches or as one product."""
    layer = sorted_experts.Sorting if way in sorted_experts.WAYS else experts.Layer
    ids = {"shape": [experts.LENGTH], "dtype": "int64", "high": experts.VOCABULARY}
    spec = {"batch": {"global": 8, "micro": 2}, "inputs": {"input_ids": ids, "labels": {"like": "input_ids"}}}
    found, _ = flops_of(experts.Net(layer(way)), {**spec, "mesh": mesh})
    of_one, _ = flops_of(
        experts.Net(sorted_experts.Sorting(sorted_experts.by_places)), {**spec, "mesh": {"dp": mesh["dp"]}}
    )
    assert found == of_one
