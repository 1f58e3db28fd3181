"""verify with ``dropout: layout_invariant``: dropout is on, on both sides, by numbers of the same names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.verify import named_draws
from runtime.verify.named_draws import NamedDraws, draws_of, draws_of_lengths
from runtime.verify.reference import OneProcess
from runtime.verify.run import VerifyReport, verify

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
    assert "test_named_draws.py" in str(error.value)


def test_a_process_that_draws_otherwise_than_captured_is_refused() -> None:
    model = Dropping(lambda x: F.dropout(x, 0.3))
    one = OneProcess(model, SMALL, NamedDraws(model, draws_of_lengths(model, SMALL), 7))
    model.way = lambda x: x
    with pytest.raises(PlanError, match=r"dropout of \[4, 8\] is missing"):
        one.forward_backward({"x": torch.randn(4, 8)})
