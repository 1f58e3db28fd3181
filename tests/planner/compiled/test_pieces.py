"""Which runs of ops the plan compiles: cut at products, collectives, draws; equal ones of all blocks share one."""

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
    "batch": {"global": 2, "micro": 2},
    "inputs": {"x": {"shape": [4, WIDTH], "dtype": "float32"}, "y": {"like": "x"}},
    "compile": True,
}


class Net(nn.Module):
    """Blocks of a norm, a linear and ``act``, with the residual."""

    def __init__(self, act: Any, num_blocks: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_blocks))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.act = act

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + self.act(linear(norm(x)))
        return F.mse_loss(x, y)


def planned(act: Any, **more: Any) -> Plan:
    return plan_again(Net(act), SPEC | more)


def test_nothing_is_compiled_where_nobody_asks():
    found = planned(F.gelu, compile=False)
    assert (found.pieces, found.compiled) == ((), ())
    assert "Compiled" not in found.describe()


def test_what_stands_between_two_products_is_one_piece_and_equal_ones_share_a_function():
    rows = planned(F.gelu).compiled
    assert [(row.block, row.ops, row.function, row.reason) for row in rows] == [
        ("block 0", "gelu, add, layer_norm", 0, ""),
        ("block 1", "gelu, add, layer_norm", 1, ""),  # the residual of block 0 is the batch: it carries no gradient
        ("block 2", "gelu, add, sub, pow, mean", 2, ""),
        ("block 0", "layer_norm", -1, "a single op between borders"),
    ]


def test_all_copies_of_a_block_share_a_function():
    rows = plan_again(Net(F.gelu, 6), SPEC).compiled
    assert [row.function for row in rows if not row.reason] == [0, 1, 1, 1, 1, 2]


def test_in_a_recomputed_block_what_runs_again_and_what_does_not_are_pieces_of_their_own():
    found = planned(lambda x: torch.tanh(x * 3) * 2, recompute="full")
    rows = [(row.block, row.ops) for row in found.compiled if not row.reason]
    assert [(piece.again, *row) for piece, row in zip(found.pieces, rows, strict=True)] == [
        (True, "block 0", "mul, tanh"),
        (True, "block 1", "mul, tanh"),
        (False, "block 1", "mul, add"),  # no backward of the block reads what the block gives
        (True, "block 2", "mul, tanh"),
        (False, "block 2", "mul, add"),
        (False, "", "sub, pow, mean"),
    ]


def test_a_captured_block_has_pieces_of_its_own():
    found = planned(lambda x: torch.tanh(x) * 2, cuda_graphs={"impl": "emulate", "scope": []})
    assert [(row.block, row.ops) for row in found.compiled if not row.reason] == [
        *((f"block {i}", "tanh, mul, add") for i in range(3)),
        ("", "sub, pow, mean"),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2.0, n=WIDTH), "complex numbers"),
        (lambda x: F.dropout(x, 0.5, True), "a random draw"),
    ],
)
def test_what_cannot_be_compiled_is_listed_with_its_reason_and_line(act: Any, reason: str):
    rows = [row for row in planned(act).compiled if row.reason == reason]
    assert rows
    assert all("test_pieces.py" in row.where and row.function == -1 for row in rows)


def test_the_plan_says_how_many_functions_there_are():
    text = planned(F.gelu).describe()
    assert "3 pieces share 3 compiled functions" in text


def test_a_plan_with_pieces_is_saved_and_loaded(tmp_path: Any):
    found = planned(F.gelu)
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.compiled == found.compiled
    assert loaded.hash() == found.hash() != planned(F.gelu, compile=False).hash()
