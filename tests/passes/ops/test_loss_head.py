"""Scores of targets on logits cut over the vocabulary are those on whole ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from passes.ops.axis import AxisHandle
from passes.ops.loss_head import SCORES, log_probabilities, loss_head, own_places
from tests.tools.examples import examples
from tests.tools.ranks import Ranks


def on_ranks(logits: Tensor, target: Tensor, tp: int) -> list[tuple[Tensor, Tensor]]:
    """Each rank's answer; columns are padded, by numbers larger than any logit, to divide."""
    num_classes = logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, -num_classes % tp), value=1e4)
    shards = padded.chunk(tp, 1)
    return Ranks(tp).run(
        lambda rank: log_probabilities(
            shards[rank].contiguous(), target, AxisHandle("tp", tp, rank), num_classes, top=True
        )[::2],
    )


@examples(15)
@given(
    num_classes=st.integers(1, 9),
    tp=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_logits_that_are_often_equal(num_classes: int, tp: int, seed: int, dtype: torch.dtype) -> None:
    """Of equal ones the first is the arg max, as PyTorch has it; with few classes some ranks have none but padding."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (12, num_classes), generator=generator).to(dtype)
    target = torch.randint(num_classes, (12,), generator=generator)
    expected = logits.double().log_softmax(1).gather(1, target[:, None])[:, 0]
    for found, is_top in on_ranks(logits, target, tp):
        assert is_top.equal(logits.double().argmax(1) == target)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_class_that_cannot_be_and_logits_far_from_zero(tp: int) -> None:
    logits = torch.tensor([[1e5, -torch.inf, 1e5 - 1.0, 0.0], [-1e5, -1e5 + 2.0, -torch.inf, -1e5]]).double()
    target = torch.tensor([1, 1])
    ((found, is_top), *_) = on_ranks(logits, target, tp)
    torch.testing.assert_close(found, logits.log_softmax(1).gather(1, target[:, None])[:, 0])
    assert is_top.tolist() == [False, True]


def test_a_score_stands_where_its_label_does_and_nowhere_if_that_is_another() -> None:
    """Rows in another order; one target is filled in, one was made of its label, one is ignored, one is no class."""
    labels = torch.tensor([[3, 1, 2], [0, 9, 1]])
    places = torch.tensor([5, 0, -1, 4, 2, 3])
    target = torch.tensor([1, 2, 1, 9, 2, 0])
    logits = torch.randn(6, 4, dtype=torch.float64)
    found = loss_head(logits, target, places, labels, None, (1, 4, 0), SCORES, True)
    assert found[2].tolist() == [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    expected = logits.log_softmax(1)
    torch.testing.assert_close(found[0, 0, 2], expected[4, 2])
    torch.testing.assert_close(found[0, 1, 2], expected[0, 1])
    assert not loss_head(logits, target, places, labels, None, (1, 4, 0), SCORES, False).any()
    assert own_places(labels).tolist() == [[0, 1, 2], [3, 4, 5]]
