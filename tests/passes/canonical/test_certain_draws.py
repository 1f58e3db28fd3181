"""A branch on a random draw is captured where the draw cannot change it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from passes.program.program import Program
from planner import PlanError
from planner.capture.export import capture


class LayerDrop(nn.Module):
    """Two layers, each skipped where ``skips`` says so, and a head."""

    def __init__(self, skips: Callable[[], bool | Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.skips():
                continue
            x = layer(x)
        return self.head(x).sum()


def captured(skips: Callable[[], bool | Tensor]) -> Program:
    return capture(LayerDrop(skips), {"x": torch.ones(2, 4)})


def num_layers(program: Program) -> int:
    return sum(n.target is torch.ops.aten.linear.default for n in program.graph.graph.nodes) - 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "skips",
    [
        lambda: torch.rand([]) < 0.0,
        lambda: torch.rand(1) < 0,
        lambda: torch.empty(1, 1).uniform_() < 0.0,
        lambda: torch.rand([]) >= 1.0,
        lambda: not torch.rand([]) < 1.0,
        lambda: not torch.rand_like(torch.ones([])) >= 0.0,
        lambda: torch.rand([]) <= -1,
    ],
)
def test_a_layer_that_no_draw_skips_is_captured(skips):
    program = captured(skips)
    assert num_layers(program) == 2
    assert not any("rand" in str(n.target) or "uniform" in str(n.target) for n in program.graph.graph.nodes)


def test_a_layer_that_every_draw_skips_is_left_out():
    assert num_layers(captured(lambda: torch.rand([]) > -1.0)) == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "skips",
    [
        lambda: torch.rand([]) < 0.1,
        lambda: torch.rand([]) - 1 < 0.0,
        lambda: torch.rand([]).mul_(-1) < 0.0,
        lambda: torch.empty([]).uniform_(-1, 1) < 0.0,
        lambda: torch.randn([]) < 0.0,
    ],
)
def test_a_branch_that_depends_on_the_draw_is_refused(skips):
    with pytest.raises(PlanError, match="cannot be captured"):
        captured(skips)


@pytest.mark.parametrize("skips", [lambda: torch.rand([]) <= 0.0, lambda: not torch.rand(1) > 0.0])
def test_that_a_draw_is_not_zero_is_assumed_and_reported(skips: Callable[[], bool | Tensor]) -> None:
    program = captured(skips)
    assert num_layers(program) == 2
    assert ["not exactly 0" in str(assumption) for assumption in program.assumptions] == [True]
