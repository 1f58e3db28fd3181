"""Complex parameters are refused by name; complex buffers and activations equal eager, and so does what is advised."""

import re

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner import plan
from tests.tools.simulated_mesh import equals_one_process, spec_of


class Turned(nn.Module):
    """Turns pairs of features by complex numbers. ``kind``: a buffer, a parameter, or pairs of real numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.last = kind, nn.Linear(8, 8), nn.Linear(8, 8)
        turn = torch.polar(torch.ones(4, dtype=torch.float64), torch.linspace(0, 1, 4, dtype=torch.float64))
        if kind == "buffer":
            self.register_buffer("turn", turn)
        else:
            self.turn = nn.Parameter(torch.view_as_real(turn).clone() if kind == "pairs" else turn)
        self.to(torch.float64) if kind == "pairs" else (self.first.double(), self.last.double())

    def forward(self, x: Tensor) -> Tensor:
        turn = torch.view_as_complex(self.turn) if self.kind == "pairs" else self.turn
        pairs = torch.view_as_complex(self.first(x).unflatten(-1, (4, 2)))
        return self.last(torch.view_as_real(pairs * turn).flatten(-2)).square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 96, dtype=torch.float64).view(4, 3, 8)}


def test_a_complex_parameter_is_refused_by_name():
    with pytest.raises(PlanError, match=re.escape("the parameter turn is complex (torch.complex128)")) as refusal:
        plan(Turned("parameter"), spec_of(batch(), {}))
    assert refusal.value.where == "turn"
    assert "view_as_complex" in refusal.value.fix


@pytest.mark.parametrize("kind", ["buffer", "pairs"])
def test_complex_buffers_and_activations_equal_eager(kind: str):
    equals_one_process(lambda: Turned(kind), batch(), {}, each=(1e-7, 1e-7))
