"""Several validation sets, and figures of the user's own: over dp ranks they are those of one process."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanError
from runtime.checkpoint.saves import saves_in
from runtime.distributed.launch import RankError
from runtime.training.data import named_files
from runtime.training.job import Job, Trained
from runtime.training.run import train
from runtime.training.validation import _added
from tests.runtime.training.test_best import MODEL, SHORT_SECONDS, SPEC
from tests.tools.limits import HANG_SECONDS

METRICS = """
import time

def figures(log_probs, labels, batch):
    assert log_probs.shape == labels.shape == batch["input_ids"].shape
    return {"vowels": (log_probs[(labels == 97) | (labels == 101)].sum(), ((labels == 97) | (labels == 101)).sum()),
            "log_prob": (log_probs.sum(), labels.numel())}

def fails(log_probs, labels, batch):
    raise ValueError("no such label")

def list_of(log_probs, labels, batch):
    return [1, 2]

def taken(log_probs, labels, batch):
    return {"loss": (1, 1)}

def no_number(log_probs, labels, batch):
    return {"mine": (float("nan"), 1)}

def nothing(log_probs, labels, batch):
    return {"mine": (1.0, 0)}

def lengths(prompts, texts, rows):
    assert prompts == [row["prompt"] for row in rows]
    return {"letters": (sum(map(len, texts)), len(texts)), "answers": (sum(row["answer"] for row in rows), 2)}

def hangs(log_probs, labels, batch):
    time.sleep(%d)

def fails_of_texts(prompts, texts, rows):
    raise KeyError("no answer")

def no_number_of_texts(prompts, texts, rows):
    return {"mine": (float("nan"), len(texts))}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in (("tokens.py", MODEL), ("metrics.py", METRICS % HANG_SECONDS)):
        (tmp_path / name).write_text(text)
    for name, words in (
        ("text.txt", "all that is said here. "),
        ("a.txt", "once more. "),
        ("b.txt", "and then again. "),
    ):
        (tmp_path / name).write_text(words * 200)
    return tmp_path


@pytest.fixture
def prompts(files: Path) -> Path:
    (files / "prompts.jsonl").write_text('{"prompt": "all that", "answer": 1}\n{"prompt": "once", "answer": 4}\n')
    return files / "prompts.jsonl"


def run(files: Path, dp: int = 1, function: str = "figures", **options: Any) -> Trained:
    held_out = "data: {validation: 0.2}"
    assert held_out in SPEC
    text = (SPEC % ("3.0e-2", "0.0")).replace("mesh: {}", f"mesh: {{dp: {dp}}}").replace(held_out, "")
    (files / "spec.yaml").write_text(text.replace("micro: 4", "micro: 2"))
    given = {"num_steps": 2, "quiet": True, "validate_every": 2, "metric": f"{files / 'metrics.py'}:{function}"}
    given["validation_data"] = (("first", str(files / "a.txt")), ("second", str(files / "b.txt")))
    names = f"{files / 'tokens.py'}:Tokens", str(files / "spec.yaml"), str(files / "text.txt")
    return train(Job(*names, **given, **options), dp)


@pytest.mark.thorough
def test_figures_of_two_sets_are_the_same_on_two_dp_ranks(files: Path) -> None:
    logged = []
    for dp in (1, 2):
        log = files / f"log-{dp}.jsonl"
        trained = run(files, dp, log=str(log))
        row = json.loads(log.read_text().splitlines()[1])
        assert row["validation_loss"] == trained.rows[1].validation_loss
        assert row["validation_loss"] == pytest.approx(-row["log_prob"], rel=1e-6)
        assert row["loss/second"] == pytest.approx(-row["log_prob/second"], rel=1e-6)
        logged.append([row[name] for name in ("vowels", "log_prob", "vowels/second", "log_prob/second")])
    assert logged[0] == pytest.approx(logged[1], rel=1e-6)
    assert len({round(value, 6) for value in logged[0]}) == 4


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dp", "function", "words"),
    [
        (1, "fails", "--metric failed: ValueError: no such label"),
        (1, "list_of", "--metric returned [1, 2]"),
        (1, "taken", "--metric returned 'loss'"),
        (1, "no_number", "--metric: mine is nan / 1"),
        (1, "nothing", "--metric: mine is"),
        (2, "fails_of_texts:texts", "--metric failed: KeyError: 'no answer'\n  at:  metrics.py"),
        (2, "no_number_of_texts:texts", "--metric: mine is nan / 2"),
    ],
)
def test_a_metric_that_fails_ends_the_run_with_a_save(
    files: Path, prompts: Path, dp: int, function: str, words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        run(files, dp, function, save=str(files / "run"), prompts=str(prompts) if "texts" in function else None)
    assert words in str(caught.value)
    assert [save.name for save in saves_in(files / "run")] == ["step-00000002"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_metric_that_hangs_on_every_rank_is_named_at_its_line_within_the_timeout(files: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(RankError, match=r"rank \d .*: stuck for \d+ s at metrics.py:\d+ in hangs"):
        run(files, 2, "hangs", timeout=SHORT_SECONDS)
    assert time.monotonic() - begun < HANG_SECONDS


@pytest.mark.parametrize("given", [["a.txt"], ["=a.txt"], ["a="], ["a=1.txt", "a=2.txt"]])
def test_names_of_sets_are_given_once(given: list[str]) -> None:
    with pytest.raises(PlanError, match=r"NAME=FILE|comes twice"):
        named_files(given)


def test_a_name_that_some_batches_lack_keeps_its_sum():
    assert _added([{"a": (1.0, 2.0), "b": (3.0, 1.0)}, {"a": (4.0, 5.0)}]) == {"a": (5.0, 7.0), "b": (3.0, 1.0)}


def test_a_metric_of_texts_gets_each_prompt_with_its_text_and_row(files: Path, prompts: Path) -> None:
    logged = []
    for dp in (1, 2):
        log = files / f"log-{dp}.jsonl"
        run(files, dp, "lengths:texts", log=str(log), prompts=str(prompts))
        row = json.loads(log.read_text().splitlines()[1])
        assert row["answers"] == 2.5
        logged.append(row["letters"])
    assert logged == [logged[0]] * 2
    assert logged[0] > 0


def test_a_prompt_longer_than_a_sequence_is_refused(files: Path) -> None:
    (files / "prompts.jsonl").write_text('{"prompt": "%s"}' % ("a" * 40))
    with pytest.raises(PlanError, match="40"):
        run(files, function="lengths:texts", prompts=str(files / "prompts.jsonl"))
