"""Stages that begin or end beside a block whose result is converted for the block after it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.api import find_layouts
from tests.models.tiny import MLP, VOCABULARY, WIDTH

SPEC = {
    "mesh": "auto",
    "batch": {"global": 512, "micro": "auto"},
    "inputs": {"ids": {"shape": [256], "dtype": "int64", "high": VOCABULARY}, "labels": {"like": "ids"}},
    "precision": {"parameters": "bfloat16"},
    "cluster": "dgx-h100",
    "devices": 16,
}


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(MLP(0.0) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_stage_of_one_block_is_estimated_where_recompute_frees_memory() -> None:
    with torch.device("meta"):
        model = Stacked()
    layouts = [candidate.point.layout for candidate in find_layouts(model, SPEC, top=3).best]
    assert ("selective", (1, 1, 1, 1)) in [(layout.recompute, layout.sizes) for layout in layouts]
