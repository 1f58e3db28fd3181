"""Samples with 1 to 900 labels train as plain PyTorch does with those labels, on every layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.gpt import GPT
from planner.spec.data import DataSpec
from runtime.data.objectives.next_token import next_token
from runtime.data.tokens import LABEL, ROW, Tokens
from tests.tools.hand_tokens import by_hand
from tests.tools.simulated_mesh import run_mesh

LENGTH, VOCABULARY = 1024, 64
LABELS = (1, 900, 37, 300)
LAYOUTS = ({}, {"tp": 2}, {"cp": 2}, {"dp": 2}, {"tp": 2, "dp": 2})


def build() -> GPT:
    torch.manual_seed(3)
    return GPT(VOCABULARY, LENGTH, 16, 1, 2).double()


def samples() -> Tokens:
    draw = np.random.default_rng(1)
    made = by_hand(*[draw.integers(3, VOCABULARY, 40 + n).tolist() for n in LABELS], vocabulary_size=VOCABULARY)
    marks = np.zeros(len(made.ids), np.uint8)
    for end, number in zip(made.ends, LABELS, strict=True):
        marks[end - number : end] = LABEL
    marks[[0, *made.ends[:-1]]] |= ROW
    return replace(made, marks=marks, is_supervised=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_losses_and_gradients_are_those_of_plain_pytorch(mesh: dict[str, int]) -> None:
    tokens = samples()
    objective = next_token(tokens, LENGTH, DataSpec(packing=False), 1)
    rows = [objective.sample(i, 0) for i in range(len(LABELS))]
    stacked = {name: np.stack([row[role] for row in rows]) for name, role in ROLES.items()}
    ran = run_mesh(build, {name: torch.from_numpy(rows) for name, rows in stacked.items()}, mesh)
    model, total = build(), torch.zeros((), dtype=torch.float64)
    for end, number, size in zip(tokens.ends, LABELS, np.diff(tokens.ends, prepend=0), strict=True):
        ids = torch.from_numpy(np.asarray(tokens.ids[end - size : end]))
        logits, _ = model(ids[None], torch.full_like(ids[None], -100))
        total = total + F.cross_entropy(logits[0, -number - 1 : -1], ids[-number:], reduction="sum")
    loss = total / sum(LABELS)
    loss.backward()
    assert float(ran.loss) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        if name in ran.gradients:
            assert parameter.grad is not None
            torch.testing.assert_close(ran.gradients[name], parameter.grad, rtol=1e-6, atol=1e-9)


ROLES = {"input_ids": "tokens", "targets": "next_tokens"}
