"""What a loss is made of decides how the shares of microbatches add up; doubts are told, with the user's line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.capture import capture
from planner.losses.batch_dims import compare_captures, wider
from planner.losses.terms import share_loss
from planner.program import Program

MICRO, LENGTH, NUM_MICROBATCHES = 2, 6, 4
INPUTS = {name: torch.zeros(MICRO, LENGTH, dtype=torch.int64, device="meta") for name in ("ids", "labels")}


class Small(nn.Module):
    """Logits of one linear; ``loss(logits, labels, weight)``."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(8, 4), nn.Linear(4, 8), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids)), labels, self.head.weight)


def rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def shared(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[list[int], list[str], list[str]]:
    """Sizes of the captures that were made; what is inexact, as code of the user's line; denominators."""
    captured: list[int] = []

    def captures(inputs: dict[str, Tensor]) -> Program:
        captured.append(inputs["ids"].shape[0])
        return capture(Small(loss), inputs)

    terms = share_loss(captures(INPUTS), NUM_MICROBATCHES, lambda: captures(wider(INPUTS)))
    return captured, [where.code for _, where in terms.inexact], terms.denominators


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels, _: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        lambda logits, labels, _: rows(logits, labels).mean(),
        lambda logits, labels, _: rows(logits, labels).mean(1).mean(),
        lambda logits, labels, w: rows(logits, labels).mean() + 0.03 * w.pow(2).sum(),
        lambda logits, labels, _: F.mse_loss(logits.sum(-1), labels.to(logits.dtype)),
    ],
)
def test_an_unambiguous_loss_is_exact_by_one_capture(loss):
    assert shared(loss)[:2] == ([MICRO], [])


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels, _: rows(logits, labels).sum() / labels.shape[0],
        lambda logits, labels, _: rows(logits, labels).sum() * (1 / labels.numel()),
        lambda logits, labels, _: rows(logits, labels).sum() / 4,
        lambda logits, labels, _: rows(logits, labels).mean(0).sum(),
    ],
)
def test_a_loss_that_may_count_sequences_is_exact_by_a_second_capture(loss):
    assert shared(loss)[:2] == ([MICRO, 2 * MICRO], [])


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels, _: rows(logits, labels).mean().exp(),
        lambda logits, labels, _: rows(logits, labels).mean() * logits.mean(),
        lambda logits, labels, _: rows(logits, labels).pow(2).sum().sqrt(),
        lambda logits, labels, _: rows(logits, labels).max(),
        lambda logits, labels, _: F.cross_entropy(logits.sum(1) @ logits.sum(1).T, torch.arange(MICRO)),
    ],
)
def test_a_loss_that_is_no_sum_over_the_batch_is_told_with_its_line(loss):
    inexact = shared(loss)[1]
    assert len(inexact) == 1
    assert "self.loss(" in inexact[0]


def test_a_count_has_one_denominator_however_often_it_is_read():
    def loss(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
        count = (labels != 0).sum()
        each = rows(logits, labels) * (labels != 0)
        return (each / count).sum() + 0.03 * each.sum() / (count + 1)

    assert shared(loss)[1:] == ([], ["denominator_0"])


def test_batch_normalisation_in_training_is_told():
    class Normed(Small):
        def __init__(self) -> None:
            super().__init__(lambda logits, labels, _: rows(logits, labels).mean())
            self.norm = nn.BatchNorm1d(LENGTH)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return self.loss(self.head(self.norm(self.embed(ids))), labels, self.head.weight)

    terms = share_loss(capture(Normed().train(), INPUTS), NUM_MICROBATCHES)
    assert "batch_norm" in terms.inexact[0][0]


def test_captures_of_two_sizes_tell_where_the_batch_stands():
    def loss(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
        return rows(logits, labels).flatten().sum() / labels.numel()

    first, second = (capture(Small(loss), inputs).graph.graph for inputs in (INPUTS, wider(INPUTS)))
    found = compare_captures(first, second)
    division = next(n for n in first.nodes if n.target is torch.ops.aten.div.Tensor)
    assert found.powers == {(division.name, 1): 1}
    assert found.dims["ids"] == found.dims["linear"] == {0}
    assert found.dims[division.name] == frozenset()


class Mixed(Small):
    """What ``mix`` makes of the features [batch, length, width] goes to the head."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda logits, labels, _: rows(logits, labels).mean())
        self.mix = mix

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.mix(self.embed(ids))), labels, self.head.weight)


MIXES = {
    "mean": lambda x: x - x.mean(0),
    "detached": lambda x: x / x.std(0).detach(),
    "softmax": lambda x: x.softmax(0),
    "halves": lambda x: x + torch.cat(x.chunk(2)[::-1]),
    "each other": lambda x: x * (x.flatten(1) @ x.flatten(1).T).mean(-1)[:, None, None],
    "flipped": lambda x: x + x.flip(0),
}
APART = {
    "norm": lambda x: x / x.pow(2).mean(-1, keepdim=True),
    "over positions": lambda x: x - x.mean(1, keepdim=True) + x.cumsum(1) + x.flip(1),
    "attention": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "merged": lambda x: x.flatten(0, 1).softmax(-1).view_as(x),
    "length first": lambda x: (x.transpose(0, 1) - x.transpose(0, 1).mean(0)).transpose(0, 1),
    "largest": lambda x: x.topk(2, sorted=False)[0].sum(-1, keepdim=True) * x,
}


def mixed(mix: Callable[[Tensor], Tensor]) -> list[tuple[str, str]]:
    model = Mixed(mix)
    terms = share_loss(capture(model, INPUTS), NUM_MICROBATCHES, lambda: capture(model, wider(INPUTS)))
    return [(op, str(where)) for op, where in terms.mixed]


@pytest.mark.parametrize("name", MIXES)
def test_mixing_the_sequences_of_a_batch_is_told_with_its_line(name):
    found = mixed(MIXES[name])
    assert found
    assert all("self.mix(" in where or "lambda x" in where for _, where in found)


@pytest.mark.parametrize("name", APART)
def test_what_keeps_sequences_apart_is_not_told(name):
    assert mixed(APART[name]) == []
