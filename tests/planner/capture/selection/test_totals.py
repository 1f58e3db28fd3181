"""Sums, means and losses of selected rows: one process's over layouts, with another number of rows on each rank."""

import math

import pytest
import torch

from passes.errors import PlanError
from planner.capture.export import capture
from tests.models.selected_losses import LOSSES, REFUSED, batch, build
from tests.numeric.test_half_precision import check as close_in_half
from tests.tools.simulated_mesh import equals_one_process

MESHES = [{"tp": 2, "dp": 2}, {"cp": 2}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", MESHES, ids=["tp2·dp2", "cp2"])
@pytest.mark.parametrize("name", LOSSES)
def test_over_a_layout_a_loss_of_selected_rows_is_that_of_one_process(name: str, mesh: dict[str, int]) -> None:
    counts = (batch()["labels"] < 12).sum(1)
    assert len(set(counts.tolist())) > 1
    equals_one_process(lambda: build(name), batch(), mesh)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cross entropy", "z", "squares", "divergence", "quotients"])
def test_in_half_precision_it_is_as_near_as_one_process(name: str, dtype: torch.dtype) -> None:
    close_in_half(lambda: build(name), [batch()], {"tp": 2, "dp": 2}, dtype, torch.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_selected_rows_otherwise_is_refused_at_its_line(name: str) -> None:
    with pytest.raises(PlanError, match=REFUSED[name][1]) as caught:
        capture(build(name), batch())
    assert "selected_losses.py" in str(caught.value.where)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["cross entropy", "each, then mean", "z"])
def test_without_any_selected_row_the_mean_is_that_of_the_model(name: str) -> None:
    model, given = build(name), batch() | {"labels": torch.full((4, 8), 20)}
    found = capture(model, batch()).graph
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    values = [
        given[n.name] if n.name in given else held[_name(n.name, held)]
        for n in found.graph.find_nodes(op="placeholder")
    ]
    assert math.isnan(model(**given).item())
    assert math.isnan(found(*values)[0].item())


def _name(holder: str, held: dict[str, torch.Tensor]) -> str:
    return next(name for name in held if holder.endswith(name.replace(".", "_")))
