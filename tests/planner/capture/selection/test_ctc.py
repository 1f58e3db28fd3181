"""CTC: one loss a sequence, however its targets are given, and shares of microbatches that add up to PyTorch's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.program.ops.aten import reads_on_host
from passes.program.ops.ctc import ctc_losses
from planner import PlanError
from planner.capture.export import capture
from tests.tools import loss_shares
from tests.tools.loss_shares import LENGTH, Loss, Small, inputs_of
from tests.tools.simulated_ranks import assert_equals_one_process


def frames(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).transpose(0, 1)


def whole(logits: Tensor) -> Tensor:
    return torch.full((len(logits),), logits.shape[1])


def padded(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    targets = labels[:, :2]
    return F.ctc_loss(frames(logits), targets, whole(logits), (targets > 0).sum(-1))


def selected(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = labels[:, :3] > 2
    targets = labels[:, :3].masked_select(mask)
    return F.ctc_loss(frames(logits), targets, whole(logits), mask.sum(-1), zero_infinity=True)


def indexed(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = labels[:, 1:4] > 3
    return F.ctc_loss(frames(logits), labels[:, 1:4][mask], whole(logits), mask.sum(1).long(), 7, "sum", True)


def by_module(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    lengths = 3 + (labels >= 0).sum(-1) // 2
    return nn.CTCLoss(blank=1, zero_infinity=True)(frames(logits), labels[:, :1].clamp(min=2), lengths, lengths // 4)


def of_each(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    lengths: Any = [LENGTH] * len(logits), [1] * len(logits)
    losses = F.ctc_loss(frames(logits), labels[:, :1].clamp(min=1), *lengths, reduction="none")
    return losses.square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("loss", [padded, selected, indexed, by_module, of_each], ids=lambda f: f.__name__)
def test_the_shares_of_microbatches_add_up_to_the_loss_of_pytorch(loss: Loss) -> None:
    found = loss_shares.shared(lambda: Small(loss), 2, 4)
    assert found.difference < 1e-9
    assert not found.is_told


def test_a_selection_that_only_ctc_reads_is_not_told() -> None:
    assert capture(Small(indexed), inputs_of(2)).rewrites == []


def test_ctc_over_tp_equals_one_process() -> None:
    generator = torch.Generator().manual_seed(2)
    batch = {name: torch.randint(1, 8, (2, LENGTH), generator=generator) for name in ("ids", "labels")}
    assert_equals_one_process(lambda: Small(padded), batch)


def in_one_row(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    mask = labels > 0
    lengths = (labels > 1).sum(-1)
    return F.ctc_loss(frames(logits), labels[mask], whole(logits), lengths)


def test_targets_in_one_row_of_unknown_ends_are_refused_at_their_line() -> None:
    with pytest.raises(PlanError, match="in one row, with data-dependent ends") as error:
        capture(Small(in_one_row), inputs_of(2))
    assert "F.ctc_loss(frames(logits), labels[mask]" in error.value.where.code  # pyright: ignore
    assert "mask.sum(-1)" in error.value.fix


def test_its_gradient_is_that_of_pytorch_and_it_stops_the_host() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    given = torch.randint(1, 5, (3, 2), generator=generator), torch.tensor([6, 5, 4]), torch.tensor([2, 1, 0])
    ours = torch.ops.meshwright.ctc_losses(logits.log_softmax(-1), *given, 0, False)
    theirs = F.ctc_loss(logits.log_softmax(-1), *given, reduction="none")
    torch.testing.assert_close(ours, theirs)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    gradients = [torch.autograd.grad((losses * weights).sum(), logits)[0] for losses in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    torch.library.opcheck(ctc_losses, (logits.log_softmax(-1).detach().requires_grad_(), *given, 0, False))
    assert reads_on_host(torch.ops.meshwright.ctc_losses.default, ())
