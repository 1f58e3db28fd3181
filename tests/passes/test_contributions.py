"""How often a backward gives the gradient of a parameter: recomputation adds no reader."""

from __future__ import annotations

import pytest

from passes.own_linears import contributions
from planner import plan
from planner.lower import lower
from tests.models.plannable import build, spec_of


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "gpt2", "llama"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_blocks_give_each_gradient_as_often(model: str, recompute: str):
    counts = []
    for asked in ("none", recompute):
        made = plan(build(model), spec_of(model, mesh={"tp": 2}, recompute=asked))
        (stage,) = lower(made, 0).stages
        counts.append(contributions(stage.module, stage.module.graph))
    assert counts[0] == counts[1]
    assert set(counts[0].values()) <= {1, 2}
