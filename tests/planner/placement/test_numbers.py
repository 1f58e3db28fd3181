"""Ops along a dim of a tensor without dims: PyTorch takes dim 0 and -1 of it, so a user's model may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from planner import plan

SPEC = {
    "mesh": {"tp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"x": {"shape": [4], "dtype": "float32"}},
}
ZERO, FIRST = torch.tensor(0), torch.zeros(1, dtype=torch.int64)
ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0),
    "mean": lambda t: t.mean(-1),
    "amax": lambda t: t.amax(0),
    "softmax": lambda t: t.softmax(0),
    "logsumexp": lambda t: t.logsumexp(0),
    "cumsum": lambda t: t.cumsum(0),
    "sort": lambda t: t.sort(0)[0],
    "index_select": lambda t: t.index_select(0, FIRST).sum(),
    "gather": lambda t: t.gather(0, ZERO),
    "unfold": lambda t: t.unfold(0, 1, 1).sum(),
}


class Gained(nn.Module):
    """An MLP whose loss is multiplied by what ``along`` makes of a number."""

    def __init__(self, along: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain, self.along = nn.Parameter(torch.tensor(1.0)), along

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean() * self.along(self.gain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ALONG)
def test_an_op_along_a_dim_of_a_number_is_planned(name: str):
    rows = {row.name: row for row in plan(Gained(ALONG[name]), SPEC).parameters}
    assert (rows["gain"].dim, rows["up.weight"].dim, rows["down.weight"].dim) == (None, 0, 1)
