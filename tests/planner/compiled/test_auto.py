"""`compile: auto`: on for clusters of GPUs without graphs, with fused norms; the plan has key and decision."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import Plan
from tests.tools.captures import plan_again

WIDTH = 16
SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"x": {"shape": [4, WIDTH], "dtype": "float32"}, "y": {"like": "x"}},
}
GRAPHS = {"impl": "local", "scope": []}


class Block(nn.Module):
    """A linear behind an RMS norm, spelled out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))) * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


def planned(**more: Any) -> Plan:
    return plan_again(Net(), SPEC | more)


def decided(found: Plan) -> tuple[bool, bool]:
    """Whether there are compiled pieces, and fused norms."""
    fused = [row for row in found.diagnostics if "aten.rms_norm (fuse_norms)" in row.what]
    return bool(found.pieces), bool(fused)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("keys", "compiled", "fused"),
    [
        ({}, False, False),
        ({"cluster": "cpu-local"}, False, False),
        ({"cluster": "h200"}, True, True),
        ({"cluster": "h200", "compile": False}, False, False),
        ({"cluster": "h200", "fuse_norms": False}, True, False),
        ({"cluster": "h200", "cuda_graphs": GRAPHS}, False, False),
        ({"cluster": "h200", "cuda_graphs": GRAPHS, "compile": True}, True, True),
        ({"compile": True}, True, True),
        ({"compile": True, "fuse_norms": False}, True, False),
    ],
    ids=str,
)
def test_auto_follows_the_cluster_and_fused_norms_go_with_it(keys: dict[str, Any], compiled: bool, fused: bool):
    found = planned(**keys)
    assert decided(found) == (compiled, fused)
    assert (found.spec["compile"], found.spec["fuse_norms"]) == tuple(keys.get(k, "auto") for k in SWITCHES)


SWITCHES = ("compile", "fuse_norms")


def test_without_gpus_the_plan_is_that_of_no_compiler():
    one, other = (planned(cluster="cpu-local", **keys).to_dict() | {"spec": None} for keys in ({}, {"compile": False}))
    assert one == other


def test_the_plan_says_where_pieces_are_compiled_and_why_they_are_not():
    assert "on GPUs with triton, and run op by op elsewhere (compile: auto)" in " ".join(
        planned(cluster="h200").describe().split()
    )
    told = [
        (row.what, row.fix) for row in planned(cluster="h200", cuda_graphs=GRAPHS).diagnostics if "auto" in row.what
    ]
    assert told == [
        (
            "compile: auto is off beside cuda_graphs: graphs of compiled pieces have not run on a GPU",
            "set compile: true to use both",
        )
    ]


def test_a_search_takes_the_times_of_compiled_pieces():
    def seconds(**keys: Any) -> float:
        asked = SPEC | {"mesh": "auto", "cluster": "h200", "devices": 1} | keys
        cost = plan_again(Net(), asked).cost
        assert cost is not None
        return cost.step_seconds

    assert seconds() == seconds(compile=True) < seconds(compile=False)
