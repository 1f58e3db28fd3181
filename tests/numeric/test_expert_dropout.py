"""Dropout inside experts: each element is dropped as where every expert computes every token, on every layout."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import PlanError
from runtime.verify.run import verify
from tests.models import experts, selected_rows
from tests.tools.captures import plan_again
from tests.tools.paths import ROOT
from tests.tools.simulated_mesh import Ran, run_mesh, spec_of

INVARIANT = {"dropout": "layout_invariant"}
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tp": 2},
    "dp2·ep2": {"dp": 2, "ep": 2},
    "cp2·ep2": {"cp": 2, "ep": 2},
    "cp2·tp2·ep4, etp 1": {"cp": 2, "tp": 2, "ep": 4, "etp": 1},
    "dp2·tp2·ep2, etp 2": {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
}
WAYS = (experts.masks, experts.columns, selected_rows.index_add, selected_rows.every_copy)


class Dropping(nn.Module):
    """Two blocks of attention and experts [hidden → width → hidden] with dropout of both; ``way`` is how tokens come to
    them."""

    def __init__(self, way: experts.Way, share: float = 0.25) -> None:
        super().__init__()
        self.model = experts.Blocks(lambda: _layer(way, share))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.model(input_ids, labels)


def _layer(way: experts.Way, share: float) -> nn.Module:
    layer = selected_rows.Selecting(way) if way in selected_rows.WAYS else experts.Layer(way)
    layer.experts = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(share), nn.Linear(12, 8), nn.Dropout(share))
        for _ in range(4)
    )
    return layer


def made(way: experts.Way, share: float = 0.25) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return Dropping(way, share).double().train()

    return make


def batch_of(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randint(experts.VOCABULARY, (rows, 8), generator=generator) for n in ("input_ids", "labels")}


def ran(way: experts.Way, mesh: dict[str, int], **more: Any) -> Ran:
    return run_mesh(made(way), batch_of(4), mesh, **more)


@cache
def alone_of(way: experts.Way) -> Ran:
    """Every expert computes every token."""
    return ran(way, {}, **INVARIANT, recompute="full")


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.covering(1, pairs=2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_the_same_elements_are_dropped_on_every_layout(way: experts.Way, layout: str) -> None:
    alone = alone_of(way)
    spread = ran(way, LAYOUTS[layout], **INVARIANT)
    torch.testing.assert_close(spread.loss, alone.loss, rtol=1e-12, atol=0)
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(spread.gradients[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.check
def test_they_are_dropped() -> None:
    losses = [run_mesh(made(experts.masks, p), batch_of(4), LAYOUTS["dp2·ep2"], **INVARIANT).loss for p in (0.25, 0.0)]
    assert abs(losses[0] - losses[1]) > 1e-3


def of_weights(layer: experts.Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A loop that drops elements of the experts' weights."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        made = F.linear(x, F.dropout(expert[0].weight, 0.25))[..., : x.shape[-1]]
        y = y + made * (probs * (chosen == number)).sum(-1, keepdim=True)
    return y


def test_elements_of_weights_have_no_names_over_ep() -> None:
    with pytest.raises(PlanError, match="no names for elements of weights") as refused:
        plan_again(made(of_weights)(), spec_of(batch_of(4), LAYOUTS["dp2·ep2"], **INVARIANT))
    assert refused.value.fix.startswith("write dropout: fast")


@pytest.mark.thorough
def test_experts_with_elements_of_weights_left_out_compute_every_token_on_one_rank() -> None:
    rows = plan_again(made(of_weights)(), spec_of(batch_of(4), {}, **INVARIANT)).diagnostics
    assert any("computes every token" in row.what and "of weights" in row.what for row in rows)


@pytest.mark.check
def test_without_names_ep_refuses_dropout_by_line_and_says_what_names_it() -> None:
    with pytest.raises(PlanError, match="draws for rows that other ranks hold") as refused:
        plan_again(made(experts.masks)(), spec_of(batch_of(4), LAYOUTS["dp2·ep2"]))
    assert refused.value.fix.startswith("set dropout: layout_invariant")


@pytest.mark.thorough
@pytest.mark.check
def test_without_names_and_without_ep_each_expert_drops_of_the_rows_that_chose_it() -> None:
    model, batch = made(experts.masks)(), batch_of(4)
    (note, *_) = [row.what for row in plan_again(model, spec_of(batch, {})).diagnostics if " experts" in row.what]
    assert "(the rows that chose it)" in note
    loss = ran(experts.masks, {}).loss
    assert torch.isfinite(loss)
    assert loss != run_mesh(made(experts.masks, 0.0), batch, {}).loss


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", ["dp: 2, ep: 2", pytest.param("cp: 2, tp: 2, ep: 4, etp: 1", marks=pytest.mark.thorough)]
)
def test_one_process_drops_the_same(tmp_path: Path, mesh: str) -> None:
    """The model itself, whose draws are made by their names."""
    (tmp_path / "dropping.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.models import experts\nfrom tests.numeric.test_expert_dropout import made\n\n"
        "build = made(experts.masks)\n"
    )
    (tmp_path / "spec.yaml").write_text(
        f"mesh: {{{mesh}}}\nbatch: {{global: 8, micro: 2}}\ndropout: layout_invariant\n"
        "inputs: {input_ids: {shape: [8], dtype: int64, high: 24}, labels: {like: input_ids}}\n"
    )
    report = verify(f"{tmp_path / 'dropping.py'}:build", str(tmp_path / "spec.yaml"), steps=2)
    assert report.passed, str(report)
    assert "dropout is on" in str(report)
