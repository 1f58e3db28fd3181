"""What a run reads: training and validation apart, refused before it begins, and the same samples after a resume."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from passes.errors import PlanError
from planner import plan
from planner.spec.spec import Spec
from runtime.data.batches import BatchLayout
from runtime.data.text.documents import parts
from runtime.data.text.encoders import ByteEncoder
from runtime.data.token_batches import TokenBatches
from runtime.data.token_writer import prepare
from runtime.training.data import check_source, run_data
from runtime.training.job import Job
from runtime.training.loop import run_rank
from runtime.training.validation import validate
from tests.tools.texts import bpe_file

MODEL = """
import torch
from examples.gpt import GPT

def build():
    torch.manual_seed(0)
    return GPT(vocabulary={vocabulary}, length=8, width=16, num_layers=2, num_heads=2)
"""


def job_in(directory: Path, vocabulary: int = 256, high: int = 256, length: int = 8, **changes: Any) -> Job:
    data = changes.pop("section", {})
    (directory / "model.py").write_text(MODEL.format(vocabulary=vocabulary))
    tokens = {"shape": [length], "dtype": "int64", "high": high}
    inputs = {"input_ids": tokens, "targets": {"like": "input_ids"}}
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, "data": data}
    (directory / "spec.yaml").write_text(yaml.safe_dump(spec))
    if "data" not in changes:
        (directory / "text").write_text(" ".join(f"word{i % 37}" for i in range(300)))
        changes["data"] = str(directory / "text")
    return Job(
        f"{directory}/model.py:build", str(directory / "spec.yaml"), num_steps=changes.pop("steps", 4), **changes
    )


def checked(job: Job) -> None:
    from planner.capture.model.reference import load_model

    spec = Spec.load(job.spec)
    check_source(job)
    run_data(job, spec, plan(load_model(job.model), spec))


def rows(job: Job) -> list[dict[str, Any]]:
    assert job.log is not None
    return [json.loads(line) for line in Path(job.log).read_text().splitlines()]


@pytest.mark.thorough
def test_validation_is_logged_and_changes_nothing_of_the_training(tmp_path: Path) -> None:
    section = {"validation": 0.1}
    run_rank(job_in(tmp_path, section=section, log=str(tmp_path / "with"), validate_every=2))
    run_rank(job_in(tmp_path, section=section, log=str(tmp_path / "without")))
    seen, plain = (
        rows(job_in(tmp_path, log=str(tmp_path / "with"))),
        rows(job_in(tmp_path, log=str(tmp_path / "without"))),
    )
    assert [row["validation_loss"] is not None for row in seen] == [False, True] * 2
    assert [row["loss"] for row in seen] == [row["loss"] for row in plain]
    assert seen[-1]["validation_loss"] < seen[1]["validation_loss"]


@pytest.mark.thorough
def test_with_a_running_mean_of_the_weights_validation_reads_it_and_training_does_not(tmp_path: Path) -> None:
    found = {}
    for decay in (None, 0.9, 0.0):
        job = job_in(tmp_path, section={"validation": 0.1}, log=str(tmp_path / str(decay)), validate_every=2)
        spec = yaml.safe_load(Path(job.spec).read_text())
        Path(job.spec).write_text(yaml.safe_dump(spec | {"optimizer": {"lr": 1e-2, "ema": decay}}))
        run_rank(job)
        found[decay] = [(row["loss"], row["validation_loss"]) for row in rows(job)]
    (losses, of_weights), (same, of_last), (again, of_mean) = (zip(*found[d], strict=True) for d in (None, 0.0, 0.9))
    assert losses == same == again
    assert of_last[1::2] == pytest.approx(of_weights[1::2]), "a mean of the last weights alone"
    assert of_mean[1] > of_weights[1], "the mean is of earlier weights"


def test_a_full_disk_under_the_log_ends_training_with_a_save(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write the log: No space left on device"):
        run_rank(job_in(tmp_path, steps=100, log="/dev/full", save=str(tmp_path / "saves")))
    assert (tmp_path / "saves" / "step-00000002").is_dir()  # the first step is shown, and the next one is the last


def test_validation_is_the_mean_loss_of_the_part_that_is_held_out(tmp_path: Path) -> None:
    job = job_in(tmp_path, section={"validation": 0.1}, validate_every=1)
    spec = Spec.load(job.spec)
    data = run_data(job, spec, plan_of(job, spec))
    (held_out,) = data.held_out
    seen: list[list[int]] = []

    def evaluate(batch: Any, *, local: bool) -> float:
        assert not local
        seen.extend(batch["input_ids"].tolist())
        return float(len(seen))

    num_batches = held_out.batches.objective.num_samples // 4
    alone: Any = SimpleNamespace(evaluate=evaluate, layout=BatchLayout({}, 4, 2, 1, 0))
    found = validate(data.held_out, alone, None)
    assert found.loss == pytest.approx(sum(range(4, 4 * num_batches + 1, 4)) / num_batches)
    assert found.figures == {}
    assert len({tuple(window) for window in seen}) == 4 * num_batches
    text = bytes(Path(job.data).read_bytes())[-(len(seen) * 8 + 40) :]
    assert all(bytes(window) in text + b"\0" for window in seen)


def plan_of(job: Job, spec: Spec) -> Any:
    from planner.capture.model.reference import load_model

    return plan(load_model(job.model), spec)


def samples_seen(job: Job, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[tuple[int, int]]]]:
    """The samples of every step that a run makes."""
    seen: list[tuple[int, list[tuple[int, int]]]] = []
    make = TokenBatches.batch

    def batch(self: TokenBatches, step: int, rows: slice | None = None) -> dict[str, torch.Tensor]:
        seen.append((step, self.indices(step, rows)))
        return make(self, step, rows)

    with monkeypatch.context() as patch:
        patch.setattr(TokenBatches, "batch", batch)
        run_rank(job)
    return seen


@pytest.mark.thorough
def test_a_resumed_run_sees_exactly_the_samples_of_an_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = samples_seen(job_in(tmp_path, steps=6), monkeypatch)
    saves = str(tmp_path / "saves")
    first = samples_seen(job_in(tmp_path, steps=3, save=saves), monkeypatch)
    second = samples_seen(job_in(tmp_path, steps=6, save=saves, resume="auto"), monkeypatch)
    assert first + second == unbroken
    assert [step for step, _ in unbroken] == [*range(6)]


@pytest.mark.thorough
def test_a_resume_on_other_data_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saves = str(tmp_path / "saves")
    run_rank(job_in(tmp_path, steps=1, save=saves))
    (tmp_path / "other").write_text("another text of some length " * 9)
    run_rank(job_in(tmp_path, steps=2, save=saves, resume="auto", data=str(tmp_path / "other")))
    assert "data was " in capsys.readouterr().err


def test_a_resume_under_another_weight_decay_of_vectors_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = str(tmp_path / "saves")
    run_rank(job_in(tmp_path, steps=1, save=saves))
    job = job_in(tmp_path, steps=2, save=saves, resume="auto")
    text = Path(job.spec).read_text()
    Path(job.spec).write_text(text + "optimizer: {no_decay: vectors}\n")
    run_rank(job)
    told = capsys.readouterr().err
    assert "optimizer.no_decay was none when " in told
    assert "and is vectors now" in told


@pytest.mark.thorough
def test_a_token_file_and_its_text_train_alike(tmp_path: Path) -> None:
    job = job_in(tmp_path, log=str(tmp_path / "text.jsonl"))
    prepare(partial(parts, [Path(job.data)]), tmp_path / "tokens", ByteEncoder())
    of_file = job_in(tmp_path, data=str(tmp_path / "tokens"), log=str(tmp_path / "tokens.jsonl"))
    run_rank(job)
    run_rank(of_file)
    assert [row["loss"] for row in rows(job)] == [row["loss"] for row in rows(of_file)]


def test_a_tokenizer_cuts_the_text_of_a_run(tmp_path: Path) -> None:
    tokenizer = bpe_file(tmp_path / "tokenizer.json")
    job = job_in(tmp_path, vocabulary=300, high=300, tokenizer=str(tokenizer), log=str(tmp_path / "log"), steps=2)
    run_rank(job)
    assert len(rows(job)) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("changes", "words", "where"),
    [
        (
            {"section": {"validation": 0.001}},
            "data.validation = 0.001 holds out too little: the held-out part of",
            "spec.yaml",
        ),
        ({"high": 100}, r"text has the id 119 at position 0.*, but inputs.input_ids.high is 100", "spec.yaml"),
        ({"vocabulary": 128}, "text as bytes has tokens up to 255, but the embedding", "spec.yaml"),
        ({"tokenizer": "none.json"}, "there is no tokenizer file none.json", "none.json"),
    ],
)
def test_data_that_does_not_fit_is_one_error_before_the_run(
    tmp_path: Path, changes: dict[str, Any], words: str, where: str
) -> None:
    with pytest.raises(PlanError, match=words) as error:
        checked(job_in(tmp_path, **changes))
    assert where in str(error.value.where)
    assert error.value.fix


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    with pytest.raises(PlanError, match="short holds 6 bytes, a sequence takes 9"):
        checked(job_in(tmp_path, data=str(tmp_path / "short")))


def test_a_token_file_whose_ids_were_changed_is_refused(tmp_path: Path) -> None:
    prepare(partial(parts, [Path(job_in(tmp_path).data)]), tmp_path / "tokens", ByteEncoder())
    content = bytearray((tmp_path / "tokens").read_bytes())
    content[4100] ^= 1
    (tmp_path / "tokens").write_bytes(content)
    with pytest.raises(PlanError, match="tokens is damaged: the checksum of its ids does not match"):
        checked(job_in(tmp_path, data=str(tmp_path / "tokens")))
