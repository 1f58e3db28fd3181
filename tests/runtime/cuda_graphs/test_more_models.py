"""Models whose regions were hard to find give with them what they give eagerly, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runtime import Engine
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import SCOPES, differences, engine_of, spec_of, train
from tests.tools.limits import HANG_SECONDS

WIDTH = 16


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["einsum", "t5-gated"])
def test_regions_that_leave_something_outside_give_what_they_give_eagerly(name):
    with (made := engine_of(name, None))[0] as engine:
        eager = train(engine, made[1])
    for scope in SCOPES:
        with (made := engine_of(name, scope))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope
            assert engine.graphs is not None
            assert all(row.captured for row in engine.plan.graph_regions)
            assert engine.graphs.num_graphs == engine.plan.graph_slots[0].num_graphs


class Block(nn.Module):
    """Norms of PyTorch's own that are several steps, one key head, residuals around both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q = self.q(h).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(h).unsqueeze(1).chunk(2, -1)
        weights = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(37, WIDTH), nn.Linear(WIDTH, 37)
        self.layers = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.table(input_ids))).flatten(0, 1), labels.flatten())


def entry_of_blocks() -> families.Entry:
    torch.manual_seed(0)
    model = Blocks().double().train()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = ((12,), torch.int64, 37)
    return families.Entry(model, {"input_ids": ids, "labels": ids})


@pytest.mark.thorough
def test_norms_that_autograd_sees_as_several_steps_add_their_gradients_in_the_same_order():
    runs = []
    for scope in (None, *SCOPES):
        entry = entry_of_blocks()
        with Engine(plan_again(entry.model, spec_of(entry, scope)), timeout_seconds=HANG_SECONDS) as engine:
            if engine.graphs is not None:
                engine.capture_graphs()
                assert all(row.captured for row in engine.plan.graph_regions)
            runs.append(train(engine, entry, 2))
    assert [differences(runs[0], run) for run in runs[1:]] == [[]] * len(SCOPES)
