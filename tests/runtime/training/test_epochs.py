"""Epochs in place of steps, runs over buckets of documents, and files to write, which are tried before a run."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanError
from planner import Plan, plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime.commands.train import LaunchOptions, job_of
from runtime.data.text.encoders import ByteEncoder
from runtime.optimizer.scalars import LearningRate
from runtime.training.data import run_data
from runtime.training.job import Job, spec_of, stored_plan
from runtime.training.loop import run_rank
from runtime.training.options import TrainOptions
from runtime.training.run import check_outputs

SPEC_OF_EPOCHS = """
mesh: {}
batch: {global: 4, micro: 2}
inputs: {input_ids: {shape: [8], dtype: int64, high: 256}, targets: {like: input_ids}}
optimizer: {schedule: {kind: cosine, steps: auto, warmup: 0.2}}
"""


def asked(folder: Path, **running: object) -> Job:
    (folder / "spec.yaml").write_text(SPEC_OF_EPOCHS)
    (folder / "text").write_text("x" * 81)  # 10 windows of 8 and their next byte
    given = LaunchOptions(data=[str(folder / "text")], **running)  # pyright: ignore
    return job_of("m.py:build", folder / "spec.yaml", given, TrainOptions())


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 5), (3.0, 8), (0.1, 1)])
def test_epochs_are_steps_in_which_every_sample_has_come(tmp_path: Path, epochs: float, steps: int) -> None:
    found = asked(tmp_path, epochs=epochs)
    assert found.num_steps == steps
    schedule = spec_of(found).optimizer.schedule
    assert (schedule.steps, schedule.warmup) == (steps, round(0.2 * steps))


def test_steps_without_epochs_are_as_given(tmp_path: Path) -> None:
    assert asked(tmp_path).num_steps == 100
    assert spec_of(asked(tmp_path, steps=50)).optimizer.schedule.warmup == 10
    for wrong in ({"steps": 5, "epochs": 1.0}, {"epochs": 0.0}, {"epochs": float("nan")}):
        with pytest.raises(PlanError, match="--epochs"):
            asked(tmp_path, **wrong)


def test_a_schedule_without_a_run_or_a_share_of_nothing_is_refused(tmp_path: Path) -> None:
    asked(tmp_path)
    with pytest.raises(PlanError, match="is the last step of"):
        LearningRate(Spec.load(str(tmp_path / "spec.yaml")).optimizer).at(0)
    with pytest.raises(PlanError, match="is a share of steps, which are missing"):
        Spec.load({"mesh": {}, "batch": {"global": 2, "micro": 2}, "optimizer": {"schedule": {"warmup": 0.1}}})
    rate = LearningRate(Spec.load({"mesh": {}, "batch": {"global": 2, "micro": 2}, "optimizer": {
        "lr": 1.0, "schedule": {"kind": "linear", "warmup": 0.5, "steps": 4}}}).optimizer)  # fmt: skip
    assert [rate.at(step) for step in range(4)] == [0.5, 1.0, 1.0, 0.5]


def test_bytes_end_at_zero_and_a_directory_has_all_of_its_ends(tmp_path: Path) -> None:
    from tests.tools.chat_tokenizers import chat_directory

    pytest.importorskip("transformers")
    from runtime.data.text.encoders import TokenizerFile
    from runtime.engine.prompts import codec_of

    assert ByteEncoder.ends == (0,)
    model = chat_directory(tmp_path / "model", "chatml", ends=["<|im_end|>", "<|end|>"])
    found = TokenizerFile(str(model))
    ids = [found.ids(text)[0] for text in ("<|im_end|>", "<|end|>", "<|endoftext|>")]
    assert list(codec_of(str(model)).ends) == ids
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(PlanError, match="and not ids of tokens"):
        TokenizerFile(str(model))


MODEL = """
import torch
from tests.models.of_documents import Gpt

def build():
    torch.manual_seed(0)
    model = Gpt()
    model.tokens, model.head = torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256, bias=False)
    return model
"""
SPEC_OF_LENGTHS = """
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
    (tmp_path / "spec.yaml").write_text(SPEC_OF_LENGTHS)
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
    other = SPEC_OF_LENGTHS.replace("[4, 8, 12]", "[4, 12]")
    (tmp_path / "other.yaml").write_text(other)
    made: Plan = plan(load_model(job.model, materialize=True), str(tmp_path / "other.yaml"))
    made.save(tmp_path / "plan.pt")
    with pytest.raises(PlanError, match=r"the plan was made with lengths: .*4, 12"):
        stored_plan(replace(job, plan=str(tmp_path / "plan.pt")), spec_of(job))


def writing(**outputs: Any) -> Job:
    return Job("m:build", "spec.yaml", "stdlib", 3, **{name: str(path) for name, path in outputs.items()})


def test_what_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "loss.png").write_text("old")
    (tmp_path / "log.jsonl").write_text("of ranks that are started again")
    check_outputs(writing(plot=tmp_path / "loss.png", tensorboard=tmp_path / "a" / "b", log=tmp_path / "log.jsonl"))
    assert (tmp_path / "loss.png").read_text() == "old"
    assert (tmp_path / "log.jsonl").read_text() == "of ranks that are started again"
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "log.jsonl", "loss.png"]


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"log": "none/log.jsonl"}, "cannot write the log: No such file or directory"),
        ({"log": "file/log.jsonl"}, "cannot write the log: Not a directory"),
        ({"plot": "none/loss.png"}, "cannot write the picture: No such file or directory"),
        ({"plot": "directory.png"}, "cannot write the picture: Is a directory"),
        ({"plot": "loss.txt"}, "loss.txt is not a supported image format"),
        ({"profile": "1", "profile_to": "none/trace.json"}, "cannot write the trace: No such file or directory"),
        ({"profile": "3"}, "ends at step 4, but the run has 3 steps"),
        ({"profile_to": "trace.json"}, "no step is profiled"),
    ],
)
def test_what_cannot_be_written_is_one_error(tmp_path: Path, outputs: dict[str, str], words: str):
    (tmp_path / "file").write_text("")
    (tmp_path / "directory.png").mkdir()
    given = {name: path if name == "profile" else tmp_path / path for name, path in outputs.items()}
    with pytest.raises(PlanError, match=words):
        check_outputs(writing(**given))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["directory.png", "file"]


@pytest.mark.parametrize(("option", "package"), [("plot", "matplotlib"), ("tensorboard", "tensorboard")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, option, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else real(name, *more))
    with pytest.raises(PlanError, match=f"--{option} needs the package {package}") as caught:
        check_outputs(writing(**{option: tmp_path / "x.png"}))
    assert f"meshwright[{option}]" in str(caught.value)
