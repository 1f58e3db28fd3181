"""Forces, the gradient of an energy inside the forward: one process's, and no exchange for what no gradient reaches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.simulated_mesh import equals_one_process

ATOMS, WIDTH, RADIAL = 6, 32, 6


class Potential(nn.Module):
    """Messages between all pairs of atoms by their distance; the loss is of the forces alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.read = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 1)
        self.up, self.down = nn.Linear(WIDTH + RADIAL, 48), nn.Linear(48, WIDTH)
        self.register_buffer("centers", torch.linspace(0, 3, RADIAL))

    def forward(self, kind: Tensor, places: Tensor, force: Tensor) -> Tensor:
        places = places.detach().requires_grad_()
        distance = (places[:, :, None] - places[:, None] + 1e-6).norm(dim=-1)
        near = torch.exp(-((distance[..., None] - self.centers) ** 2))
        atoms = self.kinds(kind)
        pairs = torch.cat([atoms[:, None].expand(-1, ATOMS, -1, -1), near], -1)
        energy = self.read(atoms + self.down(F.silu(self.up(pairs))).sum(2)).sum()
        (gradient,) = torch.autograd.grad(energy, places, create_graph=True)
        return F.l1_loss(-gradient, force)


def build() -> Potential:
    torch.manual_seed(0)
    return Potential().double()


def batch() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    places, force = (torch.randn(4, ATOMS, 3, generator=drawn, dtype=torch.float64) for _ in range(2))
    return {"kind": torch.randint(8, (4, ATOMS), generator=drawn), "places": places, "force": force}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_over_a_layout_forces_train_as_in_one_process(mesh: dict[str, Any]) -> None:
    equals_one_process(build, batch(), mesh)
