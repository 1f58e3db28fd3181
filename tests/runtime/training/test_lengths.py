"""A run over buckets of documents: its rows, its rate of operations, and its end after a resume in an epoch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanError
from planner import Plan, plan
from planner.capture.model.reference import load_model
from runtime.training.data import run_data
from runtime.training.job import Job, spec_of, stored_plan
from runtime.training.loop import run_rank

MODEL = """
import torch
from tests.models.of_documents import Gpt

def build():
    torch.manual_seed(0)
    model = Gpt()
    model.tokens, model.head = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256, bias=False)
    return model
"""
SPEC = """
mesh: {}
batch: {tokens: 48, micro: 1}
inputs:
  tokens: {shape: [[4, 8, 12]], dtype: int64}
  targets: {like: tokens}
  position_ids: {like: tokens}
  document_ids: {like: tokens}
data: {packing: documents, validation: 0.2}
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "spec.yaml").write_text(SPEC)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number:02}.txt").write_text("." * (2 + number % 10) + "\n")
    return Job(f"{tmp_path / 'model.py'}:build", str(tmp_path / "spec.yaml"), str(texts), 6, quiet=True)


def rows(job: Job, log: Path, **changed: Any) -> list[dict[str, Any]]:
    run_rank(replace(job, log=str(log), **changed))
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.thorough
def test_a_run_that_resumes_in_an_epoch_of_buckets_is_bitwise_the_same(job: Job, tmp_path: Path) -> None:
    whole = rows(job, tmp_path / "whole.jsonl", validate_every=3)
    saves = str(tmp_path / "saves")
    rows(job, tmp_path / "parts.jsonl", num_steps=3, save=saves, validate_every=3)
    parts = rows(job, tmp_path / "parts.jsonl", save=saves, resume="auto", validate_every=3)
    for name in ("loss", "grad_norm", "validation_loss"):
        assert [row.get(name) for row in parts] == [row.get(name) for row in whole]
    assert [row["step"] for row in parts] == [1, 2, 3, 4, 5, 6]


@pytest.mark.thorough
def test_batches_have_the_lengths_of_the_plan(job: Job) -> None:
    spec = spec_of(job)
    made = plan(load_model(job.model, materialize=True), spec)
    data = run_data(job, spec, made)
    sizes = {(b := data.training.batch(step))["tokens"].shape[1]: len(b["tokens"]) for step in range(40)}
    assert sizes == {4: 12, 8: 6, 12: 4}
    assert data.identity["inputs"] == "12 of 4, 6 of 8, 4 of 12"


@pytest.mark.thorough
def test_a_saved_plan_of_other_lengths_is_refused(job: Job, tmp_path: Path) -> None:
    other = SPEC.replace("[4, 8, 12]", "[4, 12]")
    (tmp_path / "other.yaml").write_text(other)
    made: Plan = plan(load_model(job.model, materialize=True), str(tmp_path / "other.yaml"))
    made.save(tmp_path / "plan.pt")
    with pytest.raises(PlanError, match=r"the plan was made with lengths: .*4, 12"):
        stored_plan(replace(job, plan=str(tmp_path / "plan.pt")), spec_of(job))
