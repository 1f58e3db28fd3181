"""A capture at another batch size is for its graph alone: one forward, since the first capture settled the rest."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan

SPEC = {
    "mesh": {"dp": 2},
    "batch": {"global": 8, "micro": 2},
    "inputs": {"ids": {"shape": [6], "dtype": "int64", "high": 9}},
}


class Cached(nn.Module):
    """It leaves a table in an attribute, and its loss counts the sequences."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log  # on a disk: lists in globals are restored after each forward
        self.tokens, self.head, self.table = nn.Embedding(9, 8), nn.Linear(8, 9), None

    def forward(self, ids: Tensor) -> Tensor:
        with self.log.open("a") as file:
            file.write(f"{len(ids)}\n")
        self.table = torch.arange(6.0)
        x = self.tokens(ids) * self.table[:, None]
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten(), reduction="sum") / len(ids)


def test_a_second_capture_calls_the_forward_once(tmp_path: Path) -> None:
    plan(Cached(tmp_path / "log"), SPEC)
    sizes = (tmp_path / "log").read_text().splitlines()
    assert sizes.count("8") == 1
    assert sizes.count("2") > 2
