"""``meshwright train --plan``: ranks run a saved plan. One of another spec, or an option that needs the model, is an
error before a rank starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from passes.errors import PlanError
from planner import plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime.training.job import Job, differing, spec_of, stored_plan
from runtime.training.run import train
from tests.tools.paths import ROOT
from tests.tools.pretrained_ranks import save_random

MODEL = f"hf:{ROOT / 'examples' / 'gpt2_small.json'}"
SPEC: dict[str, Any] = {
    "mesh": {"tp": 1},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [16], "dtype": "int64", "high": 256}, "labels": {"like": "input_ids"}},
    "initialization": {"method": "normal"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    plan(load_model(MODEL), str(folder / "spec.yaml")).save(folder / "plan.pt")
    return folder


def job(saved: Path, **more: Any) -> Job:
    given = {"model": MODEL, "spec": str(saved / "spec.yaml"), "data": "stdlib", "num_steps": 2}
    return Job(**{**given, "plan": str(saved / "plan.pt"), **more})  # pyright: ignore[reportArgumentType]


def test_a_saved_plan_without_the_steps_of_its_schedule_is_refused_with_their_number(tmp_path: Path) -> None:
    schedule = {"kind": "cosine", "steps": "auto", "warmup": 0.1}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC | {"optimizer": {"schedule": schedule}}))
    plan(load_model(MODEL), str(tmp_path / "spec.yaml")).save(tmp_path / "plan.pt")
    error = refused(job(tmp_path, num_steps=7))
    assert "steps: auto" in error.what
    assert "write steps: 7 in the spec" in error.fix


def refused(asked: Job) -> PlanError:
    with pytest.raises(PlanError) as caught:
        stored_plan(asked, spec_of(asked))
    return caught.value


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_of_a_saved_plan_never_loads_the_model(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for loader in ("load_model", "load_to_plan"):
        monkeypatch.setattr(f"planner.capture.model.reference.{loader}", None)
    train(job(saved, log=str(tmp_path / "log.jsonl")))
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2
    assert 0 < losses[1] < losses[0] < 7
    assert capfd.readouterr().err.count("MODEL has no weights: they are drawn as `initialization`") == 1


@pytest.mark.thorough
def test_a_run_of_a_saved_plan_reads_the_weights_of_its_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_random("llama", tmp_path / "base", vocab_size=256)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    plan(load_model(f"hf:{tmp_path / 'base'}"), Spec.load(SPEC)).save(tmp_path / "plan.pt")
    train(job(tmp_path, model=f"hf:{tmp_path / 'base'}", num_steps=1, quiet=True))
    assert "MODEL has no weights" not in capfd.readouterr().err


def test_a_plan_of_another_spec_is_refused_with_the_key(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SPEC, "optimizer": {"lr": 0.5}}))
    error = refused(job(saved, spec=str(tmp_path / "spec.yaml")))
    assert error.what.startswith("the plan was made with optimizer.lr: ")
    assert error.what.endswith("the spec has 0.5")


def test_a_plan_may_hold_numbers_that_the_spec_leaves_open() -> None:
    planned = Spec.load(SPEC).to_dict()
    assert list(differing({**planned, "mesh": "auto", "batch": {**planned["batch"], "micro": "auto"}}, planned)) == []
    asked = {**planned, "batch": {**planned["batch"], "global": 8}}
    assert [key for key, *_ in differing(asked, planned)] == ["batch.global"]


def test_a_plan_names_no_function_that_the_spec_leaves_open() -> None:
    planned = {"loss": "/tmp/harm.py:loss", "optimizer": {"schedule": {"kind": "os:getcwd"}}}
    found = differing({"loss": "auto", "optimizer": {"schedule": {"kind": None}}}, planned)
    assert [key for key, *_ in found] == ["loss", "optimizer.schedule.kind"]


@pytest.mark.parametrize("option", [{"compare": True}, {"audit": 1}], ids=["compare", "audit"])
def test_options_that_run_the_model_itself_are_refused(saved: Path, option: dict[str, Any]) -> None:
    (name,) = option
    error = refused(job(saved, **option))
    assert error.what == f"--{name} runs the model itself, and a saved plan does not hold its code"


def test_a_plan_of_tables_alone_does_not_run(saved: Path) -> None:
    asked = replace(job(saved), plan="plan.json")
    assert "its name does not end in .pt" in refused(asked).what
