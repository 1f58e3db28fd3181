"""A model that writes a tensor out in its forward has a plan that runs without it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner import Plan, plan
from runtime import Engine


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 4), nn.Linear(4, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scales = torch.tensor([1.0, 2.0, 3.0, 4.0])
        return F.cross_entropy(self.head(self.embed(ids) * scales).flatten(0, 1), labels.flatten())


def test_a_tensor_written_out_in_a_forward_is_in_the_plans_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Scaled()
    inputs = {"ids": {"shape": [8], "dtype": "int64", "high": 32}, "labels": {"like": "ids"}}
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs}
    made = plan(model, spec)
    made.save(tmp_path / "plan.pt")
    assert [p.name for p in Plan.load(tmp_path / "plan.pt").parameters] == [p.name for p in made.parameters]
    ids = torch.arange(32).view(4, 8)
    loss = Engine(made).forward_backward({"ids": ids, "labels": ids})
    assert abs(loss - model(ids, ids).item()) < 1e-6
