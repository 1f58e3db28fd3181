"""A value that leaves a graph for longer than its microbatch is a copy: the graph's memory is used again after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from runtime import Engine
from tests.models.families import Entry, tokens
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import Trained, differences, spec_of, train, train_on
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS

WIDTH, VOCABULARY = 16, 37


class Layer(nn.Module):
    """Adds its own loss, as a part of the layer and so of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor, total: Tensor | float) -> tuple[Tensor, Tensor]:
        x = x + self.down(F.gelu(self.up(x)))
        return x, total + F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class LossInEachLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, total = self.table(input_ids), 0.0
        for layer in self.layers:
            x, total = layer(x, labels, total)
        return total


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [2, 8])
def test_a_loss_that_a_region_makes_is_the_loss_after_its_backward_too(micro):
    runs = []
    for scope in (None, ["mlp"]):
        torch.manual_seed(0)
        entry = Entry(LossInEachLayer().double(), tokens(VOCABULARY))
        spec = spec_of(entry, scope, batch={"global": 8, "micro": micro})
        with Engine(plan_again(entry.model, spec), timeout_seconds=HANG_SECONDS) as engine:
            if engine.graphs is not None:
                engine.capture_graphs()
                assert engine.plan.graph_regions[-1].captured
            runs.append(train(engine, entry, 2))
    assert differences(*runs) == []


class _Later:
    """A send whose bytes leave when it is waited for."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._args, self._named = args, named

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        dist.send(*self._args, **self._named)


def train_with_late_sends(plan: Any, batches: Any) -> Trained:
    """On a rank: two steps; messages leave as late as they may."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine, pytest.MonkeyPatch.context() as patch:
        if engine.graphs is not None:
            engine.capture_graphs()
        if engine.groups.pp_rank == 0:
            patch.setattr(dist, "isend", _Later)
        return train_on(engine, batches[:2])


@pytest.mark.thorough
@pytest.mark.slow
def test_messages_of_a_stage_that_waits_for_no_gradient_are_those_of_their_microbatch(lab: Lab):
    split = {"pipeline": {"split": [2, 2]}}
    graphs = {"cuda_graphs": {"impl": "emulate", "scope": []}}
    cases = [Case("untrained:detached", {"pp": 2}, split | rest, job=train_with_late_sends) for rest in ({}, graphs)]
    for eager, graphed in zip(*map(lab.run, cases), strict=True):
        assert differences(eager, graphed) == []
