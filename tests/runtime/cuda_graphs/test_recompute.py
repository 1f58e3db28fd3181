"""A graph holds the rerun of what its forward let go: the same bits, whatever it captures of a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime import Engine
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import SCOPES, differences, engine_of, figures, planned, train, train_on
from tests.tools.limits import HANG_SECONDS

CASES = {
    "gpt2-dropout, full": [None, *SCOPES],
    "gpt2-dropout, selective": [["attn", "mlp"], []],
    "t5, full": [["attn"]],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_regions_whose_blocks_are_computed_again_give_what_they_give_eagerly_without(case: str):
    name, kind = case.split(", ")
    with (made := engine_of(name, None))[0] as engine:
        eager = train(engine, made[1])
    for scope in CASES[case]:
        with (made := engine_of(name, scope, recompute=kind))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope
            if scope is not None:
                assert figures(engine) == planned(engine, steps=3)


@pytest.mark.thorough
def test_several_microbatches_in_flight_draw_again_what_each_drew():
    sections = {"mesh": {}, "batch": {"global": 8, "micro": 2}, "pipeline": {"schedule": "gpipe"}}
    with (made := engine_of("gpt2-dropout", None, **sections))[0] as engine:
        eager = train(engine, made[1])
    with (made := engine_of("gpt2-dropout", ["attn"], recompute="full", **sections))[0] as engine:
        assert differences(eager, train(engine, made[1])) == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_replays_name_the_same_numbers_again_in_their_backward(kind: str, schedule: str):
    sections = {"dropout": "layout_invariant", "pipeline": {"schedule": schedule}}
    with (made := engine_of("gpt2-dropout", None, **sections))[0] as engine:
        eager = train(engine, made[1])
    for scope in (["attn"], ["full_iteration"]):
        with (made := engine_of("gpt2-dropout", scope, recompute=kind, **sections))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope


class Mixing(nn.Module):
    """The first product reads positions as features: a view from which it copies its rows, for its backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.over, self.down = nn.LayerNorm(8), nn.Linear(6, 6), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.over(self.norm(x).transpose(1, 2)).transpose(1, 2)))


class Choosing(nn.Module):
    """Each position scales its largest feature: one_hot looks at its numbers on the host of a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.up(y) * torch.nn.functional.one_hot(y.argmax(-1), 8).to(y.dtype))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(block() for _ in range(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def differences_of_recompute(block: type[nn.Module], graphs: dict[str, Any]) -> list[str]:
    """Between runs without recompute, and with it and with graphs."""
    found = []
    for more in ({}, {"recompute": "full", **graphs}):
        inputs = {"x": {"shape": [6, 8], "dtype": "float64"}}
        spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, **more}
        generator = torch.Generator().manual_seed(0)
        batches = [{"x": torch.randn(4, 6, 8, dtype=torch.float64, generator=generator)} for _ in range(3)]
        with Engine(plan_again(Net(block), spec), timeout_seconds=HANG_SECONDS) as engine:
            if engine.graphs is not None:
                engine.capture_graphs()
            found.append(train_on(engine, batches))
            assert bool(more) == bool(engine.plan.recomputed)
    return differences(*found)


WHOLE_BLOCKS = {"cuda_graphs": {"impl": "emulate", "scope": []}}


@pytest.mark.parametrize("graphs", [{}, WHOLE_BLOCKS], ids=["eager", "graphs"])
def test_a_product_that_copies_its_rows_saves_them_again_in_the_rerun(graphs: dict[str, Any]):
    assert differences_of_recompute(Mixing, graphs) == []


@pytest.mark.thorough
def test_a_rerun_is_captured_by_the_rules_of_its_forward():
    """Autograd runs the backward without the mode of the capture that stands in for one_hot."""
    assert differences_of_recompute(Choosing, WHOLE_BLOCKS) == []
