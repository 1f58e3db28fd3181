"""Where a loss looks up the probabilities of targets: by what its ops mean, of those over most classes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.partition.loss.scored import find_scored
from planner import PlanError
from planner.capture.export import capture
from tests.models import loss_idioms
from tests.tools.loss_shares import CLASSES, IGNORED, Loss, Small, built, inputs_of


def scored(loss: Loss):
    return find_scored(capture(built(lambda: Small(loss)), inputs_of(4)))


def two_tasks(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    """A small head beside: whether the label is odd."""
    return loss_idioms.shifted(logits, labels, _) + F.cross_entropy(logits[..., :2].flatten(0, 1), labels.flatten())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("loss", "num_picks", "ignored"),
    [
        (loss_idioms.gathered, 1, -(1 << 40)),
        (loss_idioms.lengths_first, 1, IGNORED),
        (loss_idioms.chunks_of_length, 3, IGNORED),
        (loss_idioms.python_loop, 4, IGNORED),
        (two_tasks, 1, IGNORED),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_picks(loss, num_picks, ignored):
    found = scored(loss)
    assert (found.key, found.num_classes, len(found.picks)) == ("labels", CLASSES, num_picks)
    assert {pick.ignored for pick in found.picks} == {ignored}


def unnormalised(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return -logits.gather(-1, labels[..., None]).mean()


def along_another_dim(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return (logits.logsumexp(1).mean() - logits.gather(-1, labels[..., None])).mean()


def of_others(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return (logits.exp().logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]).mean()


def nll_of_logits(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return F.nll_loss(logits.flatten(0, 1), labels.flatten())


def of_soft_targets(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.eye(CLASSES, dtype=logits.dtype)[labels.flatten()])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", [unnormalised, along_another_dim, of_others, nll_of_logits, of_soft_targets])
def test_what_is_no_logarithm_of_a_probability_is_refused_by_line(loss):
    with pytest.raises(PlanError, match="assigns no probability to a target") as caught:
        scored(loss)
    assert "loss_shares.py" in str(caught.value)  # the line of the forward


def of_two_inputs(logits: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.cat([labels[:2], ids[2:]]).flatten())


class Both(Small):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids)), labels, ids)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (of_two_inputs, "the targets of the loss are taken from several inputs: 'labels' and 'ids'"),
        (
            lambda logits, labels, ids: sum(F.cross_entropy(logits.flatten(0, 1), t.flatten()) for t in (labels, ids)),
            f"the loss has cross-entropies over {CLASSES} classes for several inputs: 'labels', 'ids'",
        ),
    ],
)
def test_targets_of_two_inputs_are_refused(loss, what):
    with pytest.raises(PlanError, match=what):
        find_scored(capture(built(lambda: Both(loss)), inputs_of(4)))
