"""What parameters may differ by after an update: by rounding, and by what AdamW makes of the rounding of gradients."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from passes.errors import PlanError
from passes.program.matrices import Matrices
from planner.spec.optimizer import OptimizerSpec
from planner.spec.spec import Spec
from runtime.audit.own_module import Tolerance
from runtime.verify import named_draws
from runtime.verify.comparison import (
    Beside,
    EngineStep,
    compare_gradients,
    compare_parameters,
    noise_of_matrices,
    noise_of_updates,
)
from runtime.verify.named_draws import NamedDraws, draws_of, draws_of_lengths
from runtime.verify.reference import OneProcess
from runtime.verify.run import VerifyReport, verify

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


class Unread(nn.Module):
    """The gradient of ``still`` is zero, as that of a bias of attention's keys."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.still = nn.Linear(3, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.up(x) + 0 * self.still).square().mean()


@pytest.mark.parametrize("name", ["adam", "adagrad", "adamw"])
def test_decay_beside_a_gradient_of_zero_does_not_make_a_difference_of_rounding(name: str) -> None:
    """By lr · decay / eps = 1e5 a step, rounding of 1e-16 would become 1e-5 in the step after it, and then 1."""
    optimizer = {"name": name, "lr": 1e-2, "eps": EPS, "weight_decay": 0.1}
    x = {"x": {"shape": [3], "dtype": "float64"}}
    spec = Spec.load({"mesh": {}, "batch": {"global": 4, "micro": 4}, "inputs": x, "optimizer": optimizer})
    torch.manual_seed(0)
    model, batch = Unread().double(), {"x": torch.randn(4, 3, dtype=torch.float64)}
    engine, beside = OneProcess(copy.deepcopy(model), spec), Beside(OneProcess(model, spec))
    weights = dict(engine.model.named_parameters())
    for step in range(3):
        before = {n: p.detach().clone() for n, p in weights.items()} if step else {}
        loss = engine.forward_backward(batch)
        still = weights["still"].grad
        assert still is not None
        still += 1e-16
        gradients = {n: p.grad.clone() for n, p in weights.items() if p.grad is not None}
        beside.step(batch, EngineStep(loss, engine.update(), gradients, before))
    beside.compare_parameters(weights)
    assert [str(row) for row in beside.rows if not row.passed] == []


MODEL = """
import sys
sys.path.insert(0, {root!r})
from tests.models.families import build as entry

def build():
    return entry({name!r}).model
"""
SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [16], "dtype": "int64", "high": 64}, "labels": {"like": "input_ids"}},
    "optimizer": {"lr": 1e-3},
    "dropout": "layout_invariant",
}
ROOT = str(Path(__file__).parents[3])
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}, "recompute": "full"}


def verified(path: Path, name: str, **sections: Any) -> VerifyReport:
    (path / "dropping.py").write_text(MODEL.format(root=ROOT, name=name))
    (path / "spec.yaml").write_text(str(SPEC | {"tensor_parallel": {"vocabulary_multiple": 8}} | sections))
    return verify(f"{path / 'dropping.py'}:build", str(path / "spec.yaml"), steps=3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("dropping:causal", GRAPHS),
        ("dropping:noise", {}),
        ("dropping:groups", {"batch": {"global": 4, "micro": 1}}),
        ("dropping:time_first", {"precision": {"parameters": "float32"}}),
        pytest.param("dropping:drop_path", {"mesh": {"tp": 2, "dp": 2}, **GRAPHS}, marks=pytest.mark.slow),
    ],
)
def test_one_process_draws_what_every_layout_draws(tmp_path: Path, name: str, sections: dict[str, Any]) -> None:
    report = verified(tmp_path, name, **sections)
    assert report.passed, str(report)
    assert {row.kind for row in report.rows} == {"loss", "norm", "gradient", "parameter"}
    assert "dropout is on: one process uses the same mapped random numbers" in str(report)


@pytest.mark.thorough
def test_numbers_of_other_names_are_another_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_others(model: nn.Module, spec: Spec) -> Any:
        found = draws_of(model, spec)
        return [replace(named, place=named.place._replace(site=named.place.site + 1)) for named in found]

    monkeypatch.setattr(named_draws, "draws_of", of_others)
    report = verified(tmp_path, "dropping:causal")
    assert not report.passed
    assert {"loss", "gradient", "parameter"} <= {row.kind for row in report.failed_rows}


class Dropping(nn.Module):
    """``way``: what happens between two linears; a dropout that no loss reads comes before, one of all after it."""

    def __init__(self, way: Any) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(8, 8), nn.Linear(8, 8), way

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = F.dropout(x[:, :4], 0.5)
        y = self.down(self.way(self.up(x)))
        return {"loss": (y + F.dropout(y, 1.0)).pow(2).mean(), "seen": seen}


SMALL = Spec.load({"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": {"x": {"shape": [8], "dtype": "float32"}}})


def losses(way: Any, seed: int = 7) -> list[float]:
    """Of two forwards of the same step, and of one of the next."""
    torch.manual_seed(0)
    model, batch = Dropping(way), {"x": torch.randn(4, 8)}
    one = OneProcess(model, SMALL, NamedDraws(model, draws_of_lengths(model, SMALL), seed))
    return [one.forward_backward(batch), one.forward_backward(batch), (one.update(), one.forward_backward(batch))[1]]


def test_a_draw_that_no_loss_reads_has_no_name_and_the_rest_repeat() -> None:
    first, again, later = losses(lambda x: F.dropout(x, 0.3))
    assert first == again != later
    assert losses(lambda x: F.dropout(x, 0.3), seed=8)[0] != first
    masks = draws_of(Dropping(lambda x: F.dropout(x, 0.3)), SMALL)
    assert [(named.kind, named.p, named.place.shape) for named in masks] == [("dropout", 0.3, (4, 8))]


class Aside(nn.Module):
    """``aside``: what the first of two equal layers goes through, for a result that no loss reads."""

    def __init__(self, aside: Any) -> None:
        super().__init__()
        self.first, self.second, self.aside = nn.Linear(8, 8), nn.Linear(8, 8), aside

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = self.aside(self.first(x))
        return {"loss": F.dropout(self.second(x), 0.3).pow(2).mean(), "seen": seen}


def of_another_file() -> Any:
    """A dropout on the line that has, in its file, the number of the line of the loss."""
    number, made = Aside.forward.__code__.co_firstlineno + 2, dict[str, Any]()
    text = "\n" * (number - 1) + "def drop(x): return dropout(x, 0.3)"
    exec(compile(text, "other.py", "exec"), {"dropout": F.dropout}, made)
    return made["drop"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drop", [lambda x: F.dropout(x, 0.3), of_another_file()], ids=["here", "of another file"])
def test_a_draw_that_no_loss_reads_takes_no_name_of_an_equal_one(drop: Any) -> None:
    found = []
    for aside in (lambda x: x, drop):
        torch.manual_seed(0)
        model, batch = Aside(aside), {"x": torch.randn(4, 8)}
        one = OneProcess(model, SMALL, NamedDraws(model, draws_of_lengths(model, SMALL), 7))
        found.append(one.forward_backward(batch))
    assert found[0] == found[1]


def test_a_draw_in_the_backward_is_refused_at_its_line() -> None:
    with pytest.raises(PlanError, match="one process draws random numbers in its backward") as error:
        losses(lambda x: checkpoint(lambda y: F.dropout(y, 0.3), x, use_reentrant=False))
    assert "test_comparison.py" in str(error.value)


def test_a_process_that_draws_otherwise_than_captured_is_refused() -> None:
    model = Dropping(lambda x: F.dropout(x, 0.3))
    one = OneProcess(model, SMALL, NamedDraws(model, draws_of_lengths(model, SMALL), 7))
    model.way = lambda x: x
    with pytest.raises(PlanError, match=r"dropout of \[4, 8\] is missing"):
        one.forward_backward({"x": torch.randn(4, 8)})
