"""Experts that several blocks share rest if no token of these chose them, recomputed and with sharded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.verify.reference import OneProcess
from tests.numeric.test_resting_experts import far
from tests.tools.laboratory import Lab
from tests.tools.limits import HANG_SECONDS

VOCABULARY, LENGTH, WIDTH, NUM_STEPS = 32, 4, 16, 2
SPEC: dict[str, Any] = {
    "mesh": {"ep": 2, "dp": 2, "tp": 2},
    "batch": {"global": 2, "micro": 1},
    "inputs": {name: {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY} for name in ("input_ids", "labels")},
    "optimizer": {"zero": 3},
    "recompute": "selective",
}


class Block(nn.Module):
    """Attention on the tokens as they come, then one of ``experts``; nearly all tokens go to the first."""

    def __init__(self, experts: nn.ModuleList) -> None:
        super().__init__()
        self.qkv, self.out, self.router = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = experts
        with torch.no_grad():
            self.router.bias.copy_(torch.tensor([4.0, 0.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(1, -1)
        made = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if row.numel() == 0:
                continue
            made = made.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        return x + made.view_as(x)


class Decoder(nn.Module):
    """``shared``: each two blocks have the same experts."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        experts = [self._experts() for _ in range(4)]
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(experts[i // 2 * 2 if shared else i]) for i in range(4))

    @staticmethod
    def _experts() -> nn.ModuleList:
        each = (nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in range(4))
        return nn.ModuleList(each)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(shared: bool) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shared).double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {name: torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for name in ("input_ids", "labels")}
        for _ in range(NUM_STEPS)
    ]


def trained(decided: Any) -> tuple[list[float], dict[str, Tensor]]:
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        return [engine.train_step(batch).loss for batch in batches()], engine.gather_parameters()


def on_four_ranks(host: Any, shared: bool) -> tuple[list[float], dict[str, Tensor]]:
    return host.run_ranks(4, trained, plan(build(shared), SPEC))[0]


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_trains_as_one_process(lab: Lab, shared: bool) -> None:
    losses, parameters = lab.call(on_four_ranks, shared)
    alone = OneProcess(build(shared), Spec.load({**SPEC, "mesh": {}}))
    truth = [alone.train_step(batch) for batch in batches()]
    assert losses == pytest.approx(truth, rel=1e-10)
    named = {name: value.detach() for name, value in alone.model.named_parameters()}
    assert far({name: parameters[name] for name in named}, named) < 1e-10
