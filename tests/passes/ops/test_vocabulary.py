"""Vocabulary-parallel embedding and cross-entropy against the same on whole tensors, and against the reference."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.vocabulary import cross_entropy_in_place, vocabulary_cross_entropy, vocabulary_embedding
from tests.tools.paths import ORACLES
from tests.tools.ranks import Ranks

pytestmark = pytest.mark.check

ORACLE = json.loads((ORACLES / "tp_numeric.json").read_text())["vocab_parallel_cross_entropy"]


def losses(
    shards: list[Tensor], target: Tensor, vocabulary: int, pulled: Tensor, **options
) -> list[tuple[Tensor, Tensor, int]]:
    """Each rank's loss, the gradient of its logits, and how many exchanges the forward made."""
    tp = len(shards)

    def rank_of(rank: int) -> tuple[Tensor, Tensor, int]:
        axis = AxisHandle("tp", tp, rank)
        mine = shards[rank].detach().clone().requires_grad_()
        loss = vocabulary_cross_entropy(mine, target, axis, vocabulary, **options)
        (gradient,) = torch.autograd.grad(loss, mine, pulled)
        return loss.detach(), gradient, axis.counts["all_reduce", "forward"]

    return Ranks(tp).run(rank_of)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("smoothing", ["ls0.0", "ls0.1"])
def test_losses_and_gradients_of_the_reference(tp, smoothing):
    """With label smoothing the reference is right at tp 1 alone: that is the truth at every tp."""
    logits = torch.tensor(ORACLE["logits"], dtype=torch.float64)
    target, pulled = torch.tensor(ORACLE["target"]), torch.tensor(ORACLE["grad_output"], dtype=torch.float64)
    truth = ORACLE["by_tp"]["1"][smoothing]
    expected = torch.tensor(truth["loss_by_rank"][0], dtype=torch.float64)
    expected_gradient = torch.tensor(truth["grad_by_rank"][0], dtype=torch.float64)
    if smoothing == "ls0.1":  # its smoothing spreads ε·V/(V−1) over the classes; ours is PyTorch's
        smooth = 0.1 * 16 / 15
        same = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smooth
        ).reshape(target.shape)
        torch.testing.assert_close(same, expected, rtol=1e-5, atol=1e-5)
    else:
        smooth = 0.0
    shards = list(logits.flatten(0, 1).chunk(tp, 1))
    ran = losses(shards, target.flatten(), 16, pulled.flatten(), reduction=0, label_smoothing=smooth)
    for loss, _, count in ran:
        torch.testing.assert_close(loss.reshape(target.shape), expected, rtol=1e-5, atol=1e-5)
        assert count == 2
    whole = torch.cat([g for _, g, _ in ran], 1).reshape(logits.shape)
    torch.testing.assert_close(whole, expected_gradient, rtol=1e-5, atol=1e-5)


def test_the_reference_s_unit_test_on_four_ranks():
    logits = torch.arange(8, dtype=torch.float64).repeat(16, 4)
    ran = losses([logits] * 4, torch.arange(0, 32, 2), 128, torch.ones(16, dtype=torch.float64), reduction=0)
    for (loss, _, _), expected in zip(ran, ORACLE["unit_test_tp4"], strict=True):
        torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_padding_columns_receive_no_probability(tp, dtype):
    """Padding that holds huge numbers changes neither the loss nor any gradient."""
    torch.manual_seed(0)
    vocabulary, padded = 13, 16
    logits = torch.randn(6, vocabulary).to(dtype)
    target = torch.tensor([0, 12, 5, -100, 11, 12])
    wide = torch.cat([logits, torch.full((6, padded - vocabulary), 1e4, dtype=dtype)], 1)
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole, target)
    (gradient,) = torch.autograd.grad(expected, whole)
    ran = losses(list(wide.chunk(tp, 1)), target, vocabulary, torch.ones((), dtype=dtype))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    for loss, _, _ in ran:
        torch.testing.assert_close(loss.float(), expected.detach(), **tolerance)
    held = torch.cat([g for _, g, _ in ran], 1)
    torch.testing.assert_close(held[:, :vocabulary].float(), gradient, **tolerance)
    assert torch.count_nonzero(held[:, vocabulary:]) == 0


def test_a_rank_that_holds_nothing_but_padding():
    torch.manual_seed(0)
    logits, target = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 4, 2, 1])
    wide = torch.cat([logits, torch.zeros(4, 7, dtype=torch.float64)], 1)
    ran = losses(list(wide.chunk(4, 1)), target, 5, torch.ones((), dtype=torch.float64))
    for loss, gradient, _ in ran:
        torch.testing.assert_close(loss, F.cross_entropy(logits, target))
        assert gradient.isfinite().all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4]])
    ran = losses(list(logits.chunk(2, 1)), torch.tensor([0]), 4, torch.ones(()))
    for loss, _, _ in ran:
        torch.testing.assert_close(loss, F.cross_entropy(logits, torch.tensor([0])))


@pytest.mark.parametrize("tp", [2, 4])
def test_the_parts_of_an_embedding_add_up(tp):
    torch.manual_seed(0)
    table, ids = torch.randn(8, 3, dtype=torch.float64), torch.randint(8, (2, 5))
    pulled = torch.randn(2, 5, 3, dtype=torch.float64)
    whole = table.clone().requires_grad_()
    expected = F.embedding(ids, whole)
    (gradient,) = torch.autograd.grad(expected, whole, pulled)

    def part(rank: int) -> tuple[Tensor, Tensor]:
        mine = table.chunk(tp)[rank].clone().requires_grad_()
        out = vocabulary_embedding(mine, ids, AxisHandle("tp", tp, rank), 8)
        return out.detach(), torch.autograd.grad(out, mine, pulled)[0]

    ran = [part(rank) for rank in range(tp)]
    torch.testing.assert_close(sum(out for out, _ in ran), expected.detach())
    torch.testing.assert_close(torch.cat([g for _, g in ran]), gradient)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tp", [1, 2])
def test_with_every_label_ignored_a_mean_has_no_value_and_no_gradient_as_in_torch(tp, smoothing):
    """The mean divides by 0: what comes back into the loss is infinite, and the logits' gradients are zeros."""
    torch.manual_seed(0)
    logits, target = torch.randn(5, 8, dtype=torch.float64), torch.full((5,), -100)
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(expected, whole)
    assert expected.isnan()
    assert torch.count_nonzero(gradient) == 0
    pulled = torch.ones((), dtype=torch.float64) / 0.0  # of the sum, which is divided by the count: 0
    for options in ({"reduction": 1}, {"reduction": 2}):
        ran = losses(
            list(logits.chunk(tp, 1)),
            target,
            8,
            pulled if options["reduction"] == 2 else pulled.new_ones(()),
            label_smoothing=smoothing,
            **options,
        )
        assert torch.equal(torch.cat([g for _, g, _ in ran], 1), gradient)
        assert all(loss.isnan() or options["reduction"] == 2 for loss, _, _ in ran)


@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
def test_the_loss_in_the_memory_of_its_logits_is_torch_s(reduction, smoothing, weighted):
    torch.manual_seed(0)
    x, head = torch.randn(6, 4), torch.randn(13, 4)
    target, weight = torch.tensor([0, 12, 5, -100, 11, 12]), torch.rand(13) if weighted else None

    def both(loss_of) -> tuple[Tensor, Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        logits = F.linear(leaf, head)
        loss = loss_of(logits)
        (gradient,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
        return logits.detach(), loss.detach(), gradient

    torchs: Any = {"weight": weight, "label_smoothing": smoothing, "reduction": ("none", "mean", "sum")[reduction]}
    options: Any = {"weight": weight, "label_smoothing": smoothing, "reduction": reduction}
    before, expected, expected_gradient = both(lambda z: F.cross_entropy(z, target, **torchs))
    after, loss, gradient = both(lambda z: cross_entropy_in_place(z, target, **options))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert not torch.equal(before, after), "the logits' memory was taken"
