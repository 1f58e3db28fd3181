"""Engines that only evaluate find what engines that train find, on every layout, and hold weights alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanError
from tests.tools.evaluation_jobs import (
    CALLS,
    evaluated_alone,
    memory_to_evaluate,
    refused_to_train,
    trained_and_saved,
)
from tests.tools.laboratory import Case, Lab

INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
FOLDED = {"pipeline": {"schedule": "zero_bubble_v"}}
SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
RECOMPUTED = {"recompute": "full"}
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tp 2, pp 2": ("gpt2", {"tp": 2, "pp": 2}, SEQUENCE),
    "two chunks a rank": ("gpt2", {"pp": 2, "vpp": 2}, INTERLEAVED),
    "two chunks a rank in a v": ("gpt2", {"pp": 2, "vpp": 2}, FOLDED),
    "cp 2, dp 2": ("gpt2", {"cp": 2, "dp": 2}, RECOMPUTED),
    "experts of their own ranks": ("mixtral", {"dp": 2, "ep": 2}, {}),
    "weights in shards": ("llama", {"dp": 2}, {"optimizer": {"zero": 3}}),
    "weights in shards, pp 2": ("gpt2", {"dp": 2, "pp": 2}, {"optimizer": {"zero": 3}}),
    "gradients in shards": ("llama", {"dp": 2, "tp": 2}, {"optimizer": {"zero": 2}}),
    "experts in shards": ("mixtral", {"dp": 2, "ep": 2}, {"optimizer": {"zero": 3}}),
    "adapters": ("lora", {"tp": 2}, {}),
}
CLOSE = {"cp 2, dp 2": 1.07}  # a known gap: docs/limits.md


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_an_engine_without_state_finds_what_a_training_one_finds(lab: Lab, case: str, tmp_path: Path) -> None:
    model, mesh, rest = LAYOUTS[case]
    directory = str(tmp_path / "run")
    trained = lab.run(Case(model, mesh, rest, job=trained_and_saved, job_arguments=(directory,)))
    alone = lab.run(Case(model, mesh, rest, job=evaluated_alone, job_arguments=(directory,)))
    one = {"optimizer": {"name": "sgd"}}  # another layout, and another optimizer than the save's
    elsewhere = lab.run(Case(model, {}, one, job=evaluated_alone, job_arguments=(directory,)))
    assert alone[0].loss == trained[0].loss
    assert elsewhere[0].loss == pytest.approx(trained[0].loss, rel=1e-7)  # these models compute theirs in float32
    assert alone[0].scores.log_probabilities.equal(trained[0].scores.log_probabilities)
    for found in (alone[0], elsewhere[0]):
        assert found.parameters.keys() == trained[0].parameters.keys()
        assert all(found.parameters[name].equal(x) for name, x in trained[0].parameters.items())
    for state, none in zip(trained, alone, strict=True):
        assert none.bytes < (1.0 if case == "adapters" else 0.6) * state.bytes  # a frozen base has no state


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_rank_holds_its_parameters_and_one_microbatch_as_the_plan_says(lab: Lab, case: str) -> None:
    model, mesh, rest = LAYOUTS[case]
    for rows in lab.run(Case(model, mesh, rest, job=memory_to_evaluate)):
        assert rows
        for row in rows:
            follows_routing = row.category == "activations" and model == "mixtral"  # more rows than the planned mean
            is_near = row.passed or (case in CLOSE and row.measured <= CLOSE[case] * row.predicted)
            assert is_near or follows_routing, rows


@pytest.mark.slow
def test_calls_that_train_are_refused(lab: Lab) -> None:
    (told,) = lab.run(Case("gpt2", {}, {"optimizer": {"ema": 0.5}}, job=refused_to_train))
    assert list(told) == list(CALLS)
    for name, words in told.items():
        assert f"{name} needs gradients or optimizer state, and an engine with mode 'evaluate' has none" in words


def test_an_unknown_mode_is_refused() -> None:
    from runtime import Engine

    plan: Any = None
    with pytest.raises(PlanError, match=r"no mode 'test'.*\n.*\n.*use 'train' or 'evaluate'"):
        Engine(plan, mode="test")  # pyright: ignore
