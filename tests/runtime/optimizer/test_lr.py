"""The learning rate, by values."""

import pytest
import torch

from passes.errors import PlanError
from runtime.optimizer.lr import learning_rate


def test_warmup_rises_linearly_and_reaches_lr_at_its_last_step():
    rates = [learning_rate(step, 0.8, warmup=4) for step in range(6)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_without_warmup_the_first_step_has_the_full_rate():
    assert learning_rate(0, 1e-3) == 1e-3
    assert learning_rate(0, 1e-3, kind="cosine", steps=10) == 1e-3


def test_linear_decay_falls_evenly_to_min_lr_and_stays():
    rates = [learning_rate(step, 1.0, kind="linear", warmup=2, steps=6, min_lr=0.2) for step in range(9)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_way_in_the_middle_and_stays_at_min_lr():
    rates = [learning_rate(step, 1.0, kind="cosine", warmup=2, steps=10, min_lr=0.2) for step in (2, 4, 6, 8, 10, 99)]
    assert rates == pytest.approx([1.0, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.2 + 0.4 * (1 - 0.5**0.5), 0.2, 0.2])


def test_cosine_equals_torch_cosine_annealing():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.03)
    for step in range(20):
        assert learning_rate(step, 0.3, kind="cosine", steps=20, min_lr=0.03) == pytest.approx(
            optimizer.param_groups[0]["lr"]
        )
        optimizer.step()
        scheduler.step()


def test_decay_that_ends_within_the_warmup_goes_straight_to_min_lr():
    assert learning_rate(5, 1.0, kind="linear", warmup=5, steps=5, min_lr=0.1) == pytest.approx(0.1)


def test_unknown_kind_and_missing_end_are_named_with_a_fix():
    with pytest.raises(PlanError, match="unknown learning-rate schedule 'cosin'"):
        learning_rate(0, 1.0, kind="cosin")
    with pytest.raises(PlanError, match="a cosine decay needs its last step") as error:
        learning_rate(0, 1.0, kind="cosine")
    assert error.value.where == "optimizer.schedule.steps"
