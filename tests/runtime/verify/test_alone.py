"""The one process sees each packed document alone, if the model would mix them."""

from __future__ import annotations

import torch

from planner.spec.spec import Spec
from runtime.verify.alone import each_document_alone
from runtime.verify.reference import OneProcess
from tests.models.of_mixers import Mixing, convolution
from tests.planner.test_documents import spec

PLACES = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
TOKENS = torch.arange(3, 15).view(2, 6)
BATCH = {"tokens": TOKENS, "targets": TOKENS + 1, "position_ids": PLACES}


def test_each_document_has_a_row_and_the_loss_skips_what_is_behind_it():
    found = each_document_alone(BATCH, Spec.load(spec(6)), {"targets": -100})
    assert found["targets"].tolist() == [
        [4, 5, 6, -100, -100, -100],
        [7, 8, -100, -100, -100, -100],
        [9, -100, -100, -100, -100, -100],
        [10, 11, 12, 13, 14, 15],
    ]
    assert torch.where(found["targets"] > 0, found["tokens"] + 1, -100).equal(found["targets"])


def test_the_loss_is_the_mean_over_documents_that_are_computed_one_by_one():
    model = Mixing(convolution).double()
    one = OneProcess(model, Spec.load(spec(6)), ignored={"targets": -100})
    parts = [(0, 0, 3), (0, 3, 5), (0, 5, 6), (1, 0, 6)]
    alone = sum(model(*(x[row : row + 1, a:b] for x in BATCH.values())) * (b - a) for row, a, b in parts) / 12
    assert abs(one.forward_backward(BATCH) - float(alone)) < 1e-12
