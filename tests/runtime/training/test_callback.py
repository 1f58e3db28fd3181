"""A callback asks; all ranks do it after the next step, and saves keep it. A wrong wish is refused when it is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from passes.errors import PlanError
from runtime.checkpoint.saves import saves_in
from runtime.distributed.launch import RankError
from runtime.distributed.stopping import announce_orders, asks
from runtime.report.log import StepRow
from runtime.training.job import Job, Trained
from runtime.training.run import train
from runtime.training.showing import Callback, Orders, Run
from tests.runtime.training.test_best import MODEL, SPEC
from tests.tools.limits import HANG_SECONDS

SHORT_SECONDS = 20.0  # the timeout of groups

CALLBACK = """
import time

def steer(row, run):
    run.log("own/square", row.loss ** 2)
    if row.step == 2:
        run.set_lr(0.5)
    if row.step == 3:
        run.save()
    if row.step == 6:
        run.stop()

def back(row, run):
    if row.step == 1:
        run.set_lr(None)

def wrong(row, run):
    run.set_lr(float("nan"))

def reads(row):
    pass

def waits(row, run):
    if row.step == 2:
        time.sleep(%d)
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "tokens.py").write_text(MODEL)
    (tmp_path / "calls.py").write_text(CALLBACK % HANG_SECONDS)
    (tmp_path / "text.txt").write_text("all that is said here is said once more, and then again. " * 200)
    return tmp_path


def run(files: Path, function: str, dp: int = 1, **options: Any) -> Trained:
    (files / "spec.yaml").write_text((SPEC % ("3.0e-2", "0.0")).replace("mesh: {}", f"mesh: {{dp: {dp}}}"))
    given = {"num_steps": 10, "quiet": True, "callback": f"{files / 'calls.py'}:{function}", **options}
    names = f"{files / 'tokens.py'}:Tokens", str(files / "spec.yaml"), str(files / "text.txt")
    return train(Job(*names, **given), dp)


def step_and_lr(trained: Trained) -> dict[int, float]:
    return {row.step: row.lr for row in trained.rows}


def test_all_ranks_take_another_rate_save_and_stop(files: Path) -> None:
    log, saves = files / "log.jsonl", files / "run"
    trained = run(files, "steer", dp=2, save=str(saves), log=str(log))
    rates = step_and_lr(trained)
    assert trained.stopped is None
    assert list(rates) == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, rate in rates.items() if rate == 0.5] == [4, 5, 6, 7]
    assert [save.name for save in saves_in(saves)] == ["step-00000004", "step-00000007"]
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["own/square"] for row in logged] == [row.loss**2 for row in trained.rows]


def test_a_run_says_that_the_callback_stopped_it(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(files, "steer", save=str(files / "run"))
    assert capfd.readouterr().err.count("stopped after step 7: the callback asked for it") == 1


def test_a_resumed_run_keeps_the_rate_until_the_callback_returns_to_the_schedule(files: Path) -> None:
    saves = str(files / "run")
    run(files, "steer", save=saves, num_steps=5)
    rates = step_and_lr(run(files, "back", save=saves, resume="auto", num_steps=8))
    assert rates == {step: 0.5 for step in (6, 7, 8)}
    rates = step_and_lr(run(files, "reads", save=saves, resume="auto", num_steps=9))
    assert rates == {9: 0.5}


def test_a_wrong_rate_is_refused_at_the_line_of_the_callback(files: Path) -> None:
    with pytest.raises(PlanError, match="a learning rate is a number, 0 or more") as caught:
        run(files, "wrong")
    assert caught.value.where.line == CALLBACK.splitlines().index('    run.set_lr(float("nan"))') + 1


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda run: run.save(), "add --save DIR"),
        (lambda run: run.set_lr(-1.0), "0 or more"),
        (lambda run: run.log("loss", 1.0), "every row has a figure of this name"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(ask: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ask(Run(10, has_saves=False, is_compared=False))


def test_the_rate_of_a_compared_run_is_the_schedule() -> None:
    with pytest.raises(ValueError, match="remove --compare"):
        Run(10, has_saves=False, is_compared=True).set_lr(0.1)


def test_orders_are_announced_until_they_are_taken() -> None:
    announce_orders(False)
    asked = Run(10, has_saves=True, is_compared=False)
    asked.save()
    assert asks() > 1
    assert asked.orders() == Orders(save=True)
    assert asks() == 0
    assert asked.orders() == Orders()


@pytest.mark.thorough
@pytest.mark.slow
def test_one_that_hangs_before_a_save_is_named_at_its_line_and_the_save_before_it_stays(files: Path) -> None:
    saves = files / "run"
    with pytest.raises(RankError, match=r"rank 0 .*: stuck for \d+ s at calls.py:\d+ in waits"):
        run(files, "waits", dp=2, save=str(saves), save_every=1, timeout=SHORT_SECONDS)
    assert [save.name for save in saves_in(saves)] == ["step-00000001"]


def test_a_function_of_one_argument_gets_the_row_alone(files: Path) -> None:
    row = StepRow(1, 2.0, 3.0, 0.1, 4.0)
    Callback(f"{files / 'calls.py'}:reads")(row, Run(1, has_saves=False, is_compared=False))
