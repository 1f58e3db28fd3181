"""A small model around one body, and the comparison of its captured graph with the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tools.captured_ops import gradients

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 6, 8, 16
Body = Callable[["OneBody", Tensor], Tensor]
GIVEN = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
SPEC = {"mesh": {"tp": 1}, "batch": {"global": 4, "micro": 2}, "inputs": {"ids": GIVEN, "labels": GIVEN}}


class OneBody(nn.Module):
    """Features [b, s, w] go through ``body(model, x)`` between the embedding and the head; returns the loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(self, self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for name in ("ids", "labels")}


def assert_capture_equals(model: nn.Module) -> None:
    """Loss and every gradient of the captured graph are those of ``model``, also which parameters get one."""
    loss, found = gradients(model, batch())
    expected = model(**batch())
    torch.testing.assert_close(loss, expected)
    expected.backward()
    for name, parameter in model.named_parameters():
        truth = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        given = found.get(name, torch.zeros_like(truth))
        torch.testing.assert_close(given, truth, msg=lambda text, n=name: f"{n}: {text}")
