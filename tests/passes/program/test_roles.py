"""What each parameter is for, told by the ops that read it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from passes.program.matrices import parameter_roles
from planner.capture.export import capture


class Block(nn.Module):
    """A norm, an MLP that writes into the residual, a scale, and a head that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.sin()
        x = x + self.down(F.relu(self.up(self.norm(x))))
        return {"loss": self.head(x * self.gain).square().mean()}


def test_scales_biases_residual_writes_and_the_rest():
    program = capture(Block(), {"x": torch.ones(2, 4)})
    assert parameter_roles(program.graph.graph, program.parameters) == {
        "norm.weight": "scale",
        "norm.bias": "bias",
        "up.weight": "",
        "up.bias": "bias",
        "down.weight": "residual",
        "down.bias": "bias",
        "head.weight": "",
        "gain": "scale",
    }
