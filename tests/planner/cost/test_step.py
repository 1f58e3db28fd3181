"""Model FLOPs of a step, the range of its seconds, and the figures of two papers beside the forecast."""

from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.paper import first_paper, second_paper, table_of
from planner import plan
from planner.cluster.cluster import Uncertainty
from planner.cost.layout import CostPlan, is_as_fast
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


# ---- the range of a step, and when two layouts are as fast within what is known


KNOWN = Uncertainty(compute=0.1, communication=0.3)


def step(**parts: float) -> CostPlan:
    return CostPlan(sum(parts.values()), **{"compute": 0.0, **parts}).with_range(KNOWN)


def test_each_part_adds_its_own_share() -> None:
    found = step(compute=10.0, tp_comm=2.0, pp_bubble=1.0, dp_comm=1.0)
    assert found.uncertain == pytest.approx(0.1 * 11 + 0.3 * 3)
    assert found.range == pytest.approx((14.0 - 2.0, 14.0 + 2.0))


def test_what_both_have_is_no_doubt() -> None:
    fast, slow = step(compute=10.0, tp_comm=1.0), step(compute=10.0, tp_comm=1.6)
    assert not is_as_fast(fast, slow, KNOWN)  # both ranges overlap, but collectives cost more in both, or less in both
    assert fast.range[1] > slow.range[0]


def test_collectives_for_a_bubble_may_be_worth_it_or_not() -> None:
    assert is_as_fast(step(compute=10.0, tp_comm=1.0), step(compute=10.0, pp_bubble=1.3), KNOWN)
    assert not is_as_fast(step(compute=10.0, tp_comm=1.0), step(compute=10.0, pp_bubble=2.0), KNOWN)


def test_without_doubt_only_equals_are_as_fast() -> None:
    sure = Uncertainty(compute=0.0, communication=0.0)
    one, other = CostPlan(1.0, 1.0).with_range(sure), CostPlan(1.0 + 1e-6, 1.0, tp_comm=1e-6).with_range(sure)
    assert is_as_fast(one, one, sure)
    assert not is_as_fast(one, other, sure)


def test_a_fifth_of_the_doubt_is_the_layouts_own() -> None:
    assert is_as_fast(step(compute=10.0), step(compute=10.2), KNOWN)
    assert not is_as_fast(step(compute=10.0), step(compute=10.3), KNOWN)


# ---- the figures of two papers beside the prediction from their cluster files


# 128 GPUs lose 12 points by replicas there, where 64 and 256 of the same servers lose 4 and 3: no equation here does
FAR = {"weak scaling, tp 2 with dp 64": 0.16}


@pytest.mark.thorough
def test_one_cluster_file_gives_the_scaling_of_the_first_paper() -> None:
    rows = first_paper()
    assert abs(rows[0].relative) < 0.05, rows[0]
    assert {row.what for row in rows[1:] if not row.is_near} == set(FAR), table_of(rows)
    for row in rows:
        assert row.what not in FAR or abs(row.predicted - row.measured) < FAR[row.what]


@pytest.mark.thorough
def test_three_fractions_give_the_ten_runs_of_the_second_paper() -> None:
    rows = second_paper()
    assert len(rows) == 10
    assert sum(abs(row.relative) for row in rows) / len(rows) < 0.03, table_of(rows)
    assert all(abs(row.relative) < 0.07 for row in rows), table_of(rows)
    assert spearmanr([row.measured for row in rows], [row.predicted for row in rows])[0] > 0.8, table_of(rows)
