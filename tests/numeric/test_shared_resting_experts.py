"""Experts that several blocks share rest if no token of these chose them, recomputed and with sharded weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from tests.tools.laboratory import Lab
from tests.tools.training import Trained, trained_by_spec, trained_on

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


def on_four_ranks(host: Any, shared: bool) -> Trained:
    return trained_on(host, plan(build(shared), SPEC), batches())


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_trains_as_one_process(lab: Lab, shared: bool) -> None:
    found, truth = lab.call(on_four_ranks, shared), trained_by_spec(build(shared), SPEC, batches())
    assert found.losses == pytest.approx(truth.losses, rel=1e-10)
    assert truth.furthest(found.parameters) < 1e-10
