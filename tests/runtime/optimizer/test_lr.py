"""The learning rate, by values."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import (
    get_cosine_schedule_with_warmup,
    get_inverse_sqrt_schedule,
    get_linear_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from passes.errors import PlanError
from planner.spec.optimizer import OptimizerSpec
from runtime.optimizer.scalars import LearningRate


def learning_rate(step: int, lr: float, **schedule: Any) -> float:
    return LearningRate(OptimizerSpec.model_validate({"lr": lr, "schedule": schedule})).at(step)


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


# kind → transformers' own, and how it stands in a spec; min_lr is 0.03 of the lr 0.3
THEIRS: dict[str, tuple[Callable[..., LambdaLR], dict[str, Any]]] = {
    "wsd": (
        partial(
            get_wsd_schedule,
            num_warmup_steps=4,
            num_decay_steps=6,
            num_training_steps=20,
            min_lr_ratio=0.1,
            decay_type="linear",
        ),
        {"warmup": 4, "steps": 20, "decay": 6, "min_lr": 0.03},
    ),
    "polynomial": (
        partial(
            get_polynomial_decay_schedule_with_warmup, num_warmup_steps=4, num_training_steps=20, lr_end=0.03, power=3.0
        ),
        {"warmup": 4, "steps": 20, "power": 3.0, "min_lr": 0.03},
    ),
    "inverse_root": (partial(get_inverse_sqrt_schedule, num_warmup_steps=4), {"warmup": 4}),
    "linear": (
        partial(get_linear_schedule_with_warmup, num_warmup_steps=4, num_training_steps=20),
        {"warmup": 4, "steps": 20},
    ),
    "cosine": (
        partial(get_cosine_schedule_with_warmup, num_warmup_steps=4, num_training_steps=20),
        {"warmup": 4, "steps": 20},
    ),
}


def rates_of_theirs(schedule: Callable[..., LambdaLR], num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, rates = schedule(optimizer), []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", THEIRS)
def test_a_decay_equals_that_of_transformers_at_every_step(kind):
    schedule, keys = THEIRS[kind]
    spec = OptimizerSpec.model_validate({"lr": 0.3, "schedule": {"kind": kind, **keys}})
    end = 21 if kind == "cosine" else 30  # after its last step, their cosine rises again
    rates = [LearningRate(spec).at(step) for step in range(4, end)]
    assert rates == pytest.approx(rates_of_theirs(schedule, end)[4:], rel=1e-12)


def test_the_warmup_is_that_of_transformers_one_step_earlier():
    """Theirs wastes the first update: its rate is 0."""
    theirs = rates_of_theirs(partial(get_inverse_sqrt_schedule, num_warmup_steps=4), 5)
    assert [learning_rate(step, 0.3, kind="inverse_root", warmup=4) for step in range(4)] == pytest.approx(theirs[1:])


def test_inverse_root_falls_to_min_lr_and_no_further():
    rates = [learning_rate(step, 1.0, kind="inverse_root", warmup=1, min_lr=0.4) for step in (0, 1, 4, 5, 7, 100)]
    assert rates == pytest.approx([1.0, 1.0, 0.5, 5**-0.5, 0.4, 0.4])


def of_own(tmp_path: Path, body: str) -> LearningRate:
    (tmp_path / "own_rate.py").write_text(f"def factor({'step' if 'step' in body else '_'}):\n    return {body}\n")
    kind = f"{tmp_path / 'own_rate.py'}:factor"
    return LearningRate(OptimizerSpec.model_validate({"lr": 0.5, "schedule": {"kind": kind}}))


def test_a_function_of_the_user_is_the_factor_of_lr(tmp_path):
    rate = of_own(tmp_path, "1 / (1 + step)")
    assert [rate.at(step) for step in range(4)] == [0.5, 0.25, 0.5 / 3, 0.125]


def test_a_changed_file_is_read_again(tmp_path):
    assert of_own(tmp_path, "1 + step").at(1) == 1.0
    assert of_own(tmp_path, "3 + step").at(1) == 2.0


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("float('nan')", "returned nan for step 7"),
        ("float('inf')", "returned inf for step 7"),
        ("3 - step", "returned -4 for step 7"),
        ("None", "returned NoneType for step 7"),
        ("1 / (step - 7)", "failed at step 7: ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_factor_is_one_error_at_the_function(tmp_path, body, what):
    with pytest.raises(PlanError, match=what) as error:
        of_own(tmp_path, body).at(7)
    assert "own_rate.py:" in str(error.value.where)
    assert "factor of lr" in error.value.fix
