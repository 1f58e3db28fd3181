"""Where a loss looks up the probabilities of targets: by what its ops mean, of those over most classes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.errors import PlanError
from passes.partition.loss.scored import find_scored
from planner.capture.export import capture
from tests.models import loss_idioms
from tests.models.loss_idioms import LOOPS, SHAPES
from tests.models.no_sums import NO_SUMS, OF_ANOTHER_SIZE
from tests.tools.loss_shares import CLASSES, IGNORED, Loss, Shared, Small, built, inputs_of, shared


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


# ---- however a divisor is written, the shares of microbatches add up to the model's own loss on the global batch


EXACT = 1e-9


def of(loss: Loss, micro: int, num_microbatches: int) -> Shared:
    return shared(lambda: Small(loss), micro, num_microbatches)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SHAPES)
def test_a_divisor_made_of_shapes_counts_the_global_batch(name: str) -> None:
    found = of(SHAPES[name], 2, 3)
    assert found.difference < EXACT
    assert not found.is_told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("name", [name for name in LOOPS if name != "chunk_means"])
def test_loops_chunks_and_stacks_over_the_batch_add_up_and_raise_no_false_warning(name: str, micro: int) -> None:
    found = of(LOOPS[name], micro, 3)
    assert found.difference < EXACT
    assert not found.is_told


def test_the_mean_of_chunks_means_is_exact_where_the_chunks_are_equal_and_told_where_not() -> None:
    equal, uneven = of(LOOPS["chunk_means"], 2, 3), of(LOOPS["chunk_means"], 1, 3)
    assert equal.difference < EXACT
    assert not equal.is_told
    assert uneven.is_told


REFUSED = [*((name, 1) for name in OF_ANOTHER_SIZE), ("neighbours", 2), ("columns", 1), ("columns", 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "micro"), [(n, m) for n in NO_SUMS for m in (1, 2) if (n, m) not in REFUSED])
def test_a_loss_that_is_no_sum_over_sequences_is_never_silent(name: str, micro: int) -> None:
    assert of(NO_SUMS[name], micro, 3).is_told


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "micro"), REFUSED)
def test_a_loss_whose_mean_over_microbatches_is_of_another_size_is_refused_at_its_line(name: str, micro: int) -> None:
    with pytest.raises(PlanError, match="would differ from the loss of the global batch") as error:
        of((NO_SUMS | OF_ANOTHER_SIZE)[name], micro, 3)
    assert "loss_shares.py" in str(error.value.where)
