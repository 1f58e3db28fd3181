"""What a loss is made of decides how the shares of microbatches add up; doubts are told, with the user's line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.partition.batch.align_exports import lay_on, wider
from passes.partition.loss.shares import share_loss
from passes.program.known_values import Constants
from passes.program.program import Program
from planner.capture.export import capture
from tests.tools import loss_shares
from tests.tools.loss_shares import IGNORED, LENGTH, Small, inputs_of, rows

MICRO, NUM_MICROBATCHES = 2, 4
INPUTS = inputs_of(MICRO)
GLOBAL = MICRO * NUM_MICROBATCHES


def shared(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[list[int], list[str], list[str]]:
    """Sizes of the captures that were made; what is inexact, as code of the user's line; denominators."""
    captured: list[int] = []

    def captures(times: int) -> Program:
        captured.append(MICRO * times)
        return capture(Small(loss), wider(INPUTS, times))

    terms = share_loss(captures(1), NUM_MICROBATCHES, captures)
    return captured, [where.code for _, where in terms.inexact], terms.denominators


def by_class(x: Tensor, classes: Tensor) -> Tensor:
    """The rows of each class added up: [8, features]."""
    return torch.zeros(8, x.shape[-1]).index_add(0, classes.flatten(), x.flatten(0, 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels, _: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        lambda logits, labels, _: rows(logits, labels).mean(),
        lambda logits, labels, _: rows(logits, labels).mean(1).mean(),
        lambda logits, labels, _: F.mse_loss(logits.sum(-1), labels.to(logits.dtype)),
    ],
)
def test_an_unambiguous_loss_is_exact_by_one_capture(loss):
    assert shared(loss)[:2] == ([MICRO], [])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels, _: rows(logits, labels).sum() / labels.shape[0],
        lambda logits, labels, _: rows(logits, labels).sum() * (1 / labels.numel()),
        lambda logits, labels, _: rows(logits, labels).sum() / 4,
        lambda logits, labels, _: rows(logits, labels).mean(0).sum(),
        lambda logits, labels, w: rows(logits, labels).mean() + 0.03 * w.pow(2).sum(),
    ],
)
def test_a_loss_that_may_count_sequences_is_exact_by_a_second_capture(loss):
    assert shared(loss)[:2] == ([MICRO, GLOBAL], [])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels, _: rows(logits, labels).mean().exp(),
        lambda logits, labels, _: rows(logits, labels).mean() * logits.mean(),
        lambda logits, labels, _: rows(logits, labels).pow(2).sum().sqrt(),
        lambda logits, labels, _: rows(logits, labels).max(),
        lambda logits, labels, _: F.cross_entropy(logits.sum(1) @ logits.sum(1).T, torch.arange(MICRO)),
        lambda logits, labels, w: (by_class(logits, labels.clamp(min=0)) - w @ w.T).pow(2).sum(),
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

    first, second = (capture(Small(loss), wider(INPUTS, times)) for times in (1, 3))
    graph = first.graph.graph
    found = lay_on(graph, second.graph.graph, Constants(first).nodes | Constants(second).nodes, 3)
    division = next(n for n in graph.nodes if n.target is torch.ops.aten.div.Tensor)
    assert found.others[division].args[1] == 3 * MICRO * LENGTH
    assert found.changed(first.node("ids")) == found.changed(first.node("linear")) == {0}
    assert found.changed(division) == frozenset()


class Mixed(Small):
    """What ``mix`` makes of the features [batch, length, width] goes to the head."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__(lambda logits, labels, _: rows(logits, labels).mean())
        self.mix = mix

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.mix(self.embed(ids))), labels, self.head.weight)


class Less(torch.autograd.Function):
    """Less its mean along a dim; the gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x - x.mean(dim, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,) = gradients
        return 2 * (g - g.mean(ctx.dim, keepdim=True)), None


def rows_written(x: Tensor) -> Tensor:
    """One after the other, into the tensor that the next turn reads."""
    x = x * 2
    for i in range(len(x)):
        x[i] = x[i] - x[i].mean()
        x[i].mul_(2.0)
    return x


MIXES = {
    "mean": lambda x: x - x.mean(0),
    "detached": lambda x: x / x.std(0).detach(),
    "softmax": lambda x: x.softmax(0),
    "halves": lambda x: x + torch.cat(x.chunk(2)[::-1]),
    "each other": lambda x: x * (x.flatten(1) @ x.flatten(1).T).mean(-1)[:, None, None],
    "flipped": lambda x: x + x.flip(0),
    "rows in another order": lambda x: x + x.index_select(0, torch.arange(x.shape[0]).flip(0)),
    "a custom backward": lambda x: Less.apply(x, 0),
    "added to classes": lambda x: x + by_class(x, torch.arange(x.shape[0] * x.shape[1]) % 3)[:1],
    "detached, added to classes": lambda x: x + by_class(x.detach(), torch.arange(x.shape[0] * x.shape[1]) % 3)[:1],
    "mean of classes": lambda x: (
        x
        + x.new_zeros(1, x.shape[2]).scatter_reduce(
            0, torch.zeros_like(x.flatten(0, 1), dtype=torch.int64), x.flatten(0, 1), "mean"
        )
    ),
}
APART = {
    "rows written in place": rows_written,
    "norm": lambda x: x / x.pow(2).mean(-1, keepdim=True),
    "over positions": lambda x: x - x.mean(1, keepdim=True) + x.cumsum(1) + x.flip(1),
    "attention": lambda x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "merged": lambda x: x.flatten(0, 1).softmax(-1).view_as(x),
    "length first": lambda x: (x.transpose(0, 1) - x.transpose(0, 1).mean(0)).transpose(0, 1),
    "by an index in a sequence": lambda x: x + x[:, torch.tensor([2, 1, 0])].mean(1, keepdim=True),
    "a custom backward": lambda x: Less.apply(x, 1),
    "batch normalisation by the statistics that it holds": lambda x: F.batch_norm(
        x.transpose(1, 2), torch.zeros(x.shape[2]), torch.full((x.shape[2],), 2.0)
    ).transpose(1, 2),
    "added to rows": lambda x: (
        x
        + torch.zeros_like(x.flatten(0, 1))
        .index_add(0, torch.arange(x.shape[0] * x.shape[1]), x.flatten(0, 1))
        .view_as(x)
    ),
    "largest": lambda x: x.topk(2, sorted=False)[0].sum(-1, keepdim=True) * x,
}


def mixed(mix: Callable[[Tensor], Tensor]) -> list[tuple[str, str]]:
    model = Mixed(mix)
    terms = share_loss(capture(model, INPUTS), NUM_MICROBATCHES, lambda times: capture(model, wider(INPUTS, times)))
    return [(op, str(where)) for op, where in terms.mixed]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MIXES)
def test_mixing_the_sequences_of_a_batch_is_told_with_its_line(name):
    found = mixed(MIXES[name])
    assert found
    assert all("self.mix(" in where or "lambda x" in where for _, where in found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", APART)
def test_what_keeps_sequences_apart_is_not_told(name):
    assert mixed(APART[name]) == []


class OfIds(Mixed):
    """``mix`` makes a factor of the features out of the ids alone, without a gradient."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids) * self.mix(ids)), labels, self.head.weight)


IDS_MIXED = {
    "largest of all": lambda ids: ids.max() + 1,
    "middle of a column": lambda ids: ids.float().median(0).values[None, :, None],
    "any padding": lambda ids: (ids == 0).any().float() + 1,
    "behind a cast and a view": lambda ids: ids.flatten().float().amax().view(1, 1, 1),
}
IDS_APART = {
    "largest of its own": lambda ids: ids.amax(1)[:, None, None],
    "places by padding": lambda ids: (ids != 0).cumsum(1)[:, :, None],
    "a bag of embeddings": lambda ids: F.embedding_bag(ids, torch.linspace(1, 2, 32).view(8, 4))[:, None],
    "halves of ids side by side": lambda ids: torch.hstack([ids[:, 3:], ids[:, :3]])[:, :, None],
    "columns of ids": lambda ids: torch.column_stack([ids.amax(1), ids[:, 1:]])[:, :, None],
    "the next id": lambda ids: ids.roll(1, 1)[:, :, None],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", IDS_MIXED)
def test_batch_tensors_that_mix_before_they_meet_a_weight_are_told(name):
    assert mixed_ids(IDS_MIXED[name])


def by_mean_of_columns(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """Each row is weighted by sums over all rows of the batch, which are no scalars."""
    kept = (labels != IGNORED).to(logits.dtype)
    scale = kept.sum(0, keepdim=True) / kept.sum((0, 1), keepdim=True).clamp(min=1) + kept.mean(0)
    return (rows(logits, labels) * scale).sum() / torch.ones_like(kept).sum().clamp(min=1.0)


def test_spreads_of_batch_tensors_that_meet_a_weight_are_those_of_the_global_batch():
    def spread(ids: Tensor) -> Tensor:
        return ids.double().std(0)[None, :, None] + ids.flatten().double().std().view(1, 1, 1)

    found = loss_shares.shared(lambda: OfIds(spread), MICRO, NUM_MICROBATCHES)
    assert found.difference < 1e-12
    assert not found.is_told


@pytest.mark.thorough
def test_sums_of_columns_over_inputs_are_those_of_the_global_batch():
    found = loss_shares.shared(lambda: Small(by_mean_of_columns), MICRO, NUM_MICROBATCHES)
    assert found.difference < 1e-12
    assert not found.is_told
    assert len(found.terms.denominators) == LENGTH + 1 + LENGTH


def over_mean_row(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """A statistic of values that weights have made is of a microbatch; the size of the loss is not."""
    each = logits.pow(2).sum(-1)
    return (each / each.mean(0).detach()).sum() / torch.ones_like(each).sum().clamp(min=1.0)


def test_a_loss_that_cannot_be_exact_is_of_the_size_of_one_process():
    found = loss_shares.shared(lambda: Small(over_mean_row), MICRO, NUM_MICROBATCHES)
    assert found.terms.added
    assert found.difference < 0.5


NORMALISED: tuple[loss_shares.Loss, ...] = (
    lambda logits, labels, _: (logits.sum(-1).softmax(0) * rows(logits, labels)).sum(0).mean(),
    lambda logits, labels, _: (logits.sum(-1).flatten().softmax(0) * rows(logits, labels).flatten()).sum(),
    lambda logits, labels, _: (logits.exp().sum(-1) / logits.exp().sum() * rows(logits, labels)).sum(),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", NORMALISED)
def test_a_sum_with_weights_that_add_up_to_one_is_averaged_as_the_plan_says(loss):
    found = loss_shares.shared(lambda: Small(loss), MICRO, NUM_MICROBATCHES)
    assert found.terms.inexact
    assert not found.terms.added
    assert found.difference < 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IDS_APART)
def test_batch_tensors_that_keep_apart_are_not_told(name):
    assert mixed_ids(IDS_APART[name]) == []


def mixed_ids(mix: Callable[[Tensor], Tensor]) -> list[tuple[str, str]]:
    model = OfIds(mix)
    terms = share_loss(capture(model, INPUTS), NUM_MICROBATCHES, lambda times: capture(model, wider(INPUTS, times)))
    return [(op, str(where)) for op, where in (*terms.mixed, *terms.unknown)]
