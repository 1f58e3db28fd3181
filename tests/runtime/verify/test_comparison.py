"""What parameters may differ by after an update: by rounding, and by what AdamW makes of the rounding of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from passes.program.matrices import Matrices
from planner.spec.optimizer import OptimizerSpec
from runtime.audit.own_module import Tolerance
from runtime.verify.comparison import compare_gradients, compare_parameters, noise_of_matrices, noise_of_updates

LR, EPS = 1e-3, 1e-8
ADAMW = OptimizerSpec(lr=LR, eps=EPS, clip_grad_norm=1.0)
ALLOWED = Tolerance.of(torch.float32, LR)


def updated(gradient: Tensor, scale: float = 1.0) -> Tensor:
    """A parameter of ones after torch's AdamW."""
    parameter = torch.nn.Parameter(torch.ones_like(gradient))
    parameter.grad = gradient * scale
    torch.optim.AdamW([parameter], lr=LR, eps=EPS, weight_decay=0.0).step()
    return parameter.detach()


def passed(found: Tensor, truth: Tensor, mine: Tensor, true: Tensor, scale: float = 1.0) -> bool:
    noise = noise_of_updates({"p": mine}, {"p": true}, ADAMW, 1 / scale - 1e-6)
    (row,) = compare_parameters({"p": found}, {"p": truth}, ALLOWED, noise=noise)
    return row.passed


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_gradient_as_small_as_eps_may_move_an_element_anywhere_its_rounding_does(scale: float):
    true, mine = torch.tensor([0.1, 4e-9]), torch.tensor([0.1, -5e-9])
    assert all(row.passed for row in compare_gradients({"p": mine}, {"p": true}, ALLOWED)), "rounding, as gradients go"
    found, truth = updated(mine, scale), updated(true, scale)
    assert not compare_parameters({"p": found}, {"p": truth}, ALLOWED)[0].passed
    assert passed(found, truth, mine, true, scale)


def test_an_element_that_is_moved_otherwise_than_its_gradient_says_is_told():
    true, mine = torch.tensor([0.1, 4e-9]), torch.tensor([0.1, -5e-9])
    wrong = updated(mine) + torch.tensor([0.0, 3e-4])
    assert not passed(wrong, updated(true), mine, true)
    assert not passed(updated(-mine), updated(true), mine, true), "the sign of a large one is sure"


def test_a_gradient_that_one_side_lacks_adds_no_noise():
    one = torch.tensor([1.0])
    assert noise_of_updates({}, {"p": one, "q": None}, ADAMW, 1.0) == {}


MUON = OptimizerSpec(name="muon", lr=LR)


def by_muon(gradient: Tensor) -> Tensor:
    """A matrix of zeros after torch's Muon."""
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon([weight], LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    return weight.detach()


@pytest.mark.parametrize("rest", [1e-4, 1.0])
def test_a_matrix_may_move_as_far_as_the_rounding_of_its_gradient_moves_muon(rest: float):
    """Of [24, 128] with one large singular value and a rest, which Muon raises to its size."""
    generator = torch.Generator().manual_seed(0)
    left, right, noise = (torch.randn(n, m, generator=generator) for n, m in ((24, 1), (1, 128), (24, 128)))
    true = left @ right + rest * noise
    whole = {"p": Matrices(0, 1, (24,))}
    bound = noise_of_matrices({"p": true, "q": None}, whole, MUON)
    truth, moved = by_muon(true), [by_muon(true * (1 + s * 1e-6)) for s in range(1, 200, 20)]
    rows = [compare_parameters({"p": m}, {"p": truth}, ALLOWED, noise=bound)[0] for m in moved]
    assert all(row.passed for row in rows)
    assert (bound["p"].max() > LR / 10) == (rest < 1.0), "a well-conditioned matrix adds little"
    assert not compare_parameters({"p": truth + 5 * LR}, {"p": truth}, ALLOWED, noise=bound)[0].passed


def test_gradients_of_a_later_update_may_differ_as_a_random_walk_does():
    true = {"p": torch.tensor([1.0])}
    first, later = ALLOWED, Tolerance.of(torch.float32, LR, num_updates=9)
    mine = {"p": true["p"] * (1 + 2.9 * first.gradient)}
    assert not compare_gradients(mine, true, first, step=1)[0].passed
    assert compare_gradients(mine, true, later, step=9)[0].passed
    assert not compare_gradients({"p": true["p"] * (1 + 3.1 * first.gradient)}, true, later, step=9)[0].passed
