"""A model of our own, an engine of it, and directories of its weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from planner.spec.spec import Spec
from runtime.checkpoint.safetensors_files import SINGLE
from runtime.engine.engine import Engine
from tests.tools.captures import plan_again

pytest.importorskip("transformers")


class Own(nn.Module):
    """No Hugging Face model: a tied weight, a parameter and persistent buffers that reach no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("seen", torch.tensor([5, 6]))
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.up(self.embed(ids)) * self.scale + self.table
        return self.head(hidden).logsumexp(-1).mean()


def own_engine(model: nn.Module, **sections: Any) -> Engine:
    given = {"mesh": {"tp": 1}, "batch": {"global": 2, "micro": 2}, "inputs": {"ids": {"shape": [3], "dtype": "int64"}}}
    return Engine(plan_again(model, Spec.load({**given, **sections})))


def own_checkpoint() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in Own().state_dict().items() if name != "head.weight"}
    return {**state, "scale": torch.tensor(3.0), "seen": torch.tensor([7, 8])}


def write(directory: Path, tensors: dict[str, Tensor], name: str = SINGLE) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / name)
    return directory


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def cut_short(directory: Path) -> None:
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:-4])
