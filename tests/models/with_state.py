"""A model around one function, with all that a forward may keep in Python beside its parameters."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from tests.models.one_body import SPEC, VOCABULARY, WIDTH

Middle = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.tokens, self.up, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCABULARY),
        )
        self.norm = nn.BatchNorm1d(8)
        self.calls, self.log, self.cache, self.ready = 0, [], {}, False
        self.memory: Tensor | None = None
        self.state = dataclasses.make_dataclass("State", ["seen"])(0)
        self.generator, self.draws = np.random.default_rng(0), random.Random(0)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("empty", None)
        self.plain = torch.ones(())
        self.middle = middle

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.middle(self, F.gelu(self.up(self.tokens(ids))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def assert_planned_and_left_alone(model: Model) -> None:
    """Also Python's and NumPy's generators are as they were."""
    before = {**vars(model)}, list(model.log), dict(model.cache), model.state.seen
    states = random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore
    assert plan(model, SPEC).parameters
    assert ({**vars(model)}, list(model.log), dict(model.cache), model.state.seen) == before
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # pyright: ignore
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
