"""Evaluations and scores of any number of sequences: those of one process on all of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner import Plan, plan
from runtime import Engine
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import spec_of
from tests.tools.laboratory import Case, session_lab
from tests.tools.limits import HANG_SECONDS

NUMBERS = (1, 3, 8, 9, 20)
SPREAD = {"tp": 2, "pp": 2, "dp": 2}


def entry_of(name: str) -> tuple[families.Entry, Plan]:
    entry = families.build(name)
    return entry, plan_again(entry.model, spec_of(entry, None))


def alone(entry: families.Entry, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return entry.loss(entry.model(**batch)).item()


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "gpt"])
def test_any_number_of_sequences_has_the_loss_of_one_process(name: str) -> None:
    entry, made = entry_of(name)
    with Engine(made) as engine:
        for number in NUMBERS:
            batch = entry.batch(number, number)
            assert engine.evaluate(batch) == pytest.approx(alone(entry, batch), rel=2e-6, nan_ok=True)


@pytest.mark.parametrize("name", ["gpt2", "gpt"])
def test_scores_are_those_of_each_sequence(name: str) -> None:
    entry, made = entry_of(name)
    batch = entry.batch(11, 0)
    with Engine(made) as engine:
        found = engine.score(batch)
        parts = [engine.score({k: x[i : i + 8] for k, x in batch.items()}) for i in (0, 3)]
    assert len(found.is_scored) == 11
    assert found.is_scored.any()
    for place in ("log_probabilities", "is_top", "is_scored"):
        whole, first, last = (getattr(s, place) for s in (found, *parts))
        torch.testing.assert_close(whole[:8], first, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(whole[3:], last, rtol=1e-12, atol=1e-12)


def evaluations(made: Plan, batches: list[dict[str, Tensor]], name: str) -> list[float]:
    entry = families.build(name)
    with Engine(made, timeout_seconds=HANG_SECONDS) as engine:
        return [engine.evaluate(entry.batch(number, number)) for number in NUMBERS]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_on_eight_ranks_too(name: str) -> None:
    found = session_lab().run(Case(name, SPREAD, job=evaluations, job_arguments=(name,)))
    entry = families.build(name)
    truth = [alone(entry, entry.batch(number, number)) for number in NUMBERS]
    assert all(each == pytest.approx(truth, rel=2e-6, nan_ok=True) for each in found)


class Squares(nn.Module):
    """A mean over all rows: nothing is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.line(x).squeeze(-1) - y) ** 2).mean()


class Sums(Squares):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.line(x).squeeze(-1) - y) ** 2).sum()


def spec() -> dict[str, Any]:
    inputs = {"x": {"shape": [4], "dtype": "float32"}, "y": {"shape": [], "dtype": "float32"}}
    return {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs}


def rows(number: int) -> dict[str, Tensor]:
    return {"x": torch.randn(number, 4), "y": torch.randn(number)}


def test_a_mean_over_sequences_takes_the_planned_number_alone() -> None:
    with Engine(plan(Squares(), spec())) as engine:
        engine.evaluate(rows(4))
        with pytest.raises(PlanError, match=r"the batch has 6 sequences, and the plan 4: .* no sum over sequences"):
            engine.evaluate(rows(6))
        with pytest.raises(PlanError, match=r"has shape \[6, 4\], the plan expects \[4, 4\]"):
            engine.train_step(rows(6))


def test_a_plain_sum_takes_multiples() -> None:
    model, batch = Sums(), rows(8)
    with Engine(plan(model, spec())) as engine:
        assert engine.evaluate(batch) == pytest.approx(model(**batch).item(), rel=1e-5)
        with pytest.raises(PlanError, match=r"has 6 sequences, and this loss counts every sequence"):
            engine.evaluate(rows(6))


class Penalised(nn.Module):
    """Beside counted tokens a plain sum, to which every sequence adds."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten()) + 0.01 * x.pow(2).sum()


def test_a_term_that_counts_every_sequence_is_seen() -> None:
    ids = {"shape": [3], "dtype": "int64", "high": 8}
    asked = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": {"ids": ids, "labels": ids}}
    model, batch = Penalised(), {name: torch.randint(8, (8, 3)) for name in ("ids", "labels")}
    with Engine(plan(model, asked)) as engine:
        assert engine.evaluate(batch) == pytest.approx(model(**batch).item(), rel=1e-5)
        with pytest.raises(PlanError, match=r"has 6 sequences, and this loss counts every sequence"):
            engine.evaluate({name: x[:6] for name, x in batch.items()})


def test_training_takes_the_planned_number() -> None:
    entry, made = entry_of("gpt")
    with Engine(made) as engine, pytest.raises(PlanError, match="the plan expects"):
        engine.train_step(entry.batch(11, 0))
