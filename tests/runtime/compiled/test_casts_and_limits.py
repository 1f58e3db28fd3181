"""Compiled code rounds as the ops do, unless the spec says otherwise; collectives wait for ranks that compile."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from runtime import Engine
from runtime.compiled.functions import SECONDS_A_FUNCTION, CompiledPieces, first_calls
from runtime.distributed.groups import Groups
from tests.planner.compiled.test_auto import planned

WIDTH = 64
SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 2, "micro": 2},
    "inputs": {"x": {"shape": [8, WIDTH], "dtype": "float32"}, "y": {"like": "x"}},
    "precision": {"parameters": "bfloat16"},
}


class Norm(nn.Module):
    """In float32, between two casts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = Norm(), Norm(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.linear(self.second(self.first(x) * 1.3 + x * 0.7)).float(), y.float())


def gradients(**keys: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batch = Net(), {name: torch.randn(2, 8, WIDTH) for name in "xy"}
    with Engine(plan(model, SPEC | keys)) as engine:
        engine.forward_backward(batch)
        assert engine.compiled is None or engine.compiled.report.eager == []
        return engine.gather_gradients()


@pytest.mark.thorough
def test_compiled_code_rounds_to_bfloat16_where_the_model_does():
    eager, found = gradients(), gradients(compile=True)
    skipped = gradients(compile=True, emulate_precision_casts=False)
    for name, expected in eager.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)
        assert (skipped[name] - expected).norm() > 1e-3 * expected.norm()


def limit_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_collectives_of_the_first_step_wait_longer_by_what_ranks_compile():
    own, extra = timedelta(minutes=5), 2 * timedelta(seconds=SECONDS_A_FUNCTION)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=own)
    try:
        made: Any = dist.new_group([0], timeout=own)
        world: Any = dist.group.WORLD
        decided = planned(compile=True)
        with Engine(decided) as engine:
            pieces = CompiledPieces(engine.program, num_functions=2)
            groups = Groups(decided.mesh, 0, torch.device("cpu"), own, made=[made], world=None)
            for limits in ((own + extra, own), (own, own)):
                with first_calls(pieces, groups):
                    during = limit_of(made)
                assert (during, limit_of(made)) == limits
            assert limit_of(world) == own  # a group of the user's keeps the user's
    finally:
        dist.destroy_process_group()


def test_without_compiled_pieces_no_limit_changes():
    with Engine(planned()) as engine, first_calls(engine.compiled, engine.groups):
        assert engine.compiled is None
