"""How often a backward gives the gradient of a parameter: recomputation adds no reader, and one that is only compared,
rounded to a position or detached gives none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.own_linears import contributions
from planner import plan
from planner.lower import lower
from tests.models.plannable import build, spec_of


@pytest.mark.thorough
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


class Gated(nn.Module):
    """``up`` is read twice: for a value, and for what ``ends`` makes of it without a gradient."""

    def __init__(self, ends: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.unread = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        gate = self.ends(self.unread(x)) if self.ends is torch.detach else 1.0
        return F.silu(self.down(torch.where(self.ends(self.up(x)) > 0, self.up(x + 1), gate * x))).square().mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ends", [torch.detach, torch.ones_like, lambda x: x, lambda x: x.argmax(-1, keepdim=True)])
def test_a_reader_that_no_backward_reaches_gives_no_gradient(ends: Callable[[Tensor], Tensor]):
    inputs = {"x": {"shape": [4, 8], "dtype": "float32"}}
    made = plan(Gated(ends), {"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": inputs})
    (stage,) = lower(made, 0).stages
    counts = contributions(stage.module, stage.module.graph)
    assert [times for times in counts.values() if times] == [1] * 4  # weights and biases of up and of down
