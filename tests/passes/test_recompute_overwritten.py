"""Values that an op overwrites in a recomputed block, as a loss its logits: kept, or overwritten again by the rerun."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.test_recompute import KINDS, differing
from tests.tools.simulated_mesh import run_mesh


class Supervised(nn.Module):
    """A loss after each block, of logits that it overwrites. ``classes``; ``cast``: logits are cast to float64;
    ``each``: a weighted sum over the tokens' losses; ``own``: a head for each block.
    """

    def __init__(self, classes: int = 16, *, cast: bool = False, each: bool = False, own: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.cast, self.each = cast, each
        self.tokens = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, classes) for _ in range(3 if own else 1))
        self.to(torch.float32 if cast else torch.float64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, loss = self.tokens(ids), torch.zeros((), dtype=torch.float64)
        for number, block in enumerate(self.blocks):
            x = block(x)
            rows = self.heads[number % len(self.heads)](x).flatten(0, 1)
            loss = loss + self.loss(rows.double() if self.cast else rows, labels.flatten())
        return loss

    def loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        if not self.each:
            return F.cross_entropy(rows, labels)
        return (F.cross_entropy(rows, labels, reduction="none").square() * (labels > 0)).mean()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


SUPERVISED: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "shared head": ({}, {}),
    "own heads, tp2": ({"own": True}, {"tp": 2}),
    "cast logits": ({"cast": True}, {}),
    "two classes": ({"classes": 2}, {}),
    "losses of tokens": ({"each": True}, {}),
}


@pytest.mark.sampled(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SUPERVISED)
def test_a_value_that_a_loss_overwrites_is_kept_or_comes_back_overwritten(name: str, kind: str):
    options, mesh = SUPERVISED[name]
    batch = {
        "ids": torch.arange(20).view(4, 5) % 16,
        "labels": torch.arange(20).view(4, 5) % options.get("classes", 16),
    }
    without, found = (run_mesh(lambda: Supervised(**options), batch, mesh, recompute=k) for k in ("none", kind))
    assert found.plan.recompute
    assert found.loss == without.loss
    assert differing(found.gradients, without.gradients) == []
