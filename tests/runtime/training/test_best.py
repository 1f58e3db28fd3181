"""The best save, early stop, callbacks and Weights & Biases: a run of one process each."""

import json
import sys
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
from tests.tools.limits import HANG_SECONDS

MODEL = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids, targets):
        return nn.functional.cross_entropy(self.head(self.tokens(input_ids)).flatten(0, 1), targets.flatten())
"""
SPEC = """
mesh: {}
batch: {global: 8, micro: 4}
inputs: {input_ids: {shape: [16], dtype: int64, high: 256}, targets: {like: input_ids}}
data: {validation: 0.2}
optimizer: {lr: %s, weight_decay: 0.0, schedule: {kind: linear, steps: 8, min_lr: %s}}
"""
CALLBACK = """
import json
import time
from pathlib import Path

def note(row):
    with Path(__file__).with_name("rows").open("a") as file:
        file.write(json.dumps([row.step, row.loss, row.validation_loss]) + "\\n")

def fail(row):
    if row.step == 2:
        raise KeyError("no such figure")

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
SHORT_SECONDS = 20.0  # the timeout of groups
WANDB = """
import json
from pathlib import Path

LOGGED = Path(__file__).with_name("logged")

class Run:
    def log(self, figures, step):
        if (LOGGED.parent / "fails").exists() and step == 2:
            raise RuntimeError("no network")
        note(step, sorted(figures)[:2])
    def finish(self):
        note("finished")

def note(*given):
    with LOGGED.open("a") as file:
        print(*given, file=file)

def init(**given):
    config = given.pop("config")
    note(json.dumps(given), config["steps"], config["spec"]["optimizer"]["lr"])
    return Run()
"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A training; ``calls``: the function of CALLBACK that is its callback."""
    (tmp_path / "packages").mkdir()
    for name, text in (("tokens.py", MODEL), ("calls.py", CALLBACK % HANG_SECONDS), ("packages/wandb.py", WANDB)):
        (tmp_path / name).write_text(text)
    (tmp_path / "text.txt").write_text("all that is said here is said once more, and then again. " * 200)

    def with_options(calls: str = "", lr: str = "3.0e-2", min_lr: str = "0.0", dp: int = 1, **options: Any) -> Trained:
        (tmp_path / "spec.yaml").write_text((SPEC % (lr, min_lr)).replace("mesh: {}", f"mesh: {{dp: {dp}}}"))
        names = f"{tmp_path / 'tokens.py'}:Tokens", str(tmp_path / "spec.yaml"), str(tmp_path / "text.txt")
        own = {"callback": f"{tmp_path / 'calls.py'}:{calls}", "num_steps": 10} if calls else {"num_steps": 8}
        return train(Job(*names, **{"quiet": True, **own, **options}), dp)

    return with_options


DIVERGES = {"lr": "30.0", "min_lr": "30.0"}  # the first update is already too large


@pytest.mark.thorough
def test_the_best_save_stays_and_patience_ends_the_run(run, tmp_path, capfd):
    saves = tmp_path / "run"
    rows = run(**DIVERGES, validate_every=1, keep_best=True, patience=3, save=str(saves)).rows
    losses = [row.validation_loss for row in rows]
    best = losses.index(min(losses)) + 1
    assert len(rows) == best + 3 < 8
    assert [path.name for path in saves_in(saves / "best")] == [f"step-{best:08d}"]
    assert [path.name for path in saves_in(saves)] == [f"step-{len(rows):08d}"]
    assert f"stopped after step {best + 3}: 3 validations without a lower loss" in capfd.readouterr().err
    rows = run(**DIVERGES, validate_every=1, patience=5, save=str(saves), resume="auto").rows
    assert [row.step for row in rows] == [best + 4, best + 5], "the count goes on after a resume"


def test_a_run_that_gets_better_keeps_its_last_validation_alone_and_goes_to_its_end(run, tmp_path):
    rows = run(validate_every=3, keep_best=True, patience=1, save=str(tmp_path / "run")).rows
    assert len(rows) == 8
    assert [path.name for path in saves_in(tmp_path / "run" / "best")] == ["step-00000006"]


@pytest.mark.thorough
def test_a_callback_gets_each_row_and_wandb_each_figure(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    trained = run("note", num_steps=3, validate_every=2, wandb="tokens")
    sys.modules.pop("wandb")
    logged = (tmp_path / "packages" / "logged").read_text().splitlines()
    told, run_id = logged[0], json.loads(logged[0].partition("}")[0] + "}")["id"]
    assert len(run_id) == 8
    given = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert given == [[row.step, row.loss, row.validation_loss] for row in trained.rows]
    assert given[1][2] is not None
    assert told == f'{{"project": "tokens", "name": null, "id": "{run_id}", "resume": "allow"}} 3 0.03'
    assert logged[1:] == [*(f"{step} ['data_share', 'flops_per_s']" for step in (1, 2, 3)), "finished"]


def test_a_resumed_run_goes_on_in_weights_and_biases_under_its_name_and_id(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    for steps, place in ((2, "tokens"), (3, "tokens/again")):
        run(num_steps=steps, save=str(tmp_path / "first"), resume="auto", wandb=place)
    sys.modules.pop("wandb")
    logged = (tmp_path / "packages" / "logged").read_text().splitlines()
    first, second = (json.loads(line.partition("}")[0] + "}") for line in logged if line.startswith("{"))
    assert (first["name"], second["name"]) == ("first", "again")
    assert first["id"] == second["id"]
    assert [line.split()[0] for line in logged if line[0].isdigit()] == ["1", "2", "3"]


def test_weights_and_biases_that_fails_ends_the_run_with_a_save(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    (tmp_path / "packages" / "fails").touch()
    with pytest.raises(PlanError, match="Weights & Biases: RuntimeError: no network"):
        run(num_steps=5, save=str(tmp_path / "run"), wandb="tokens")
    sys.modules.pop("wandb")
    assert [path.name for path in saves_in(tmp_path / "run")] == ["step-00000003"]


def test_what_a_callback_raises_is_one_error_at_its_line(run, tmp_path):
    with pytest.raises(PlanError, match="the callback failed after step 2: KeyError") as error:
        run("fail", num_steps=3)
    assert (Path(error.value.where.file).name, error.value.where.code) == (
        "calls.py",
        'raise KeyError("no such figure")',
    )


@pytest.mark.thorough
def test_a_mixture_of_texts_trains_and_names_both_in_its_saves(run, tmp_path):
    (tmp_path / "other.txt").write_text("0123456789" * 400)
    mixture = ((str(tmp_path / "text.txt"), 3.0), (str(tmp_path / "other.txt"), 1.0))
    assert len(run(num_steps=2, mixture=mixture, validate_every=2, save=str(tmp_path / "run")).rows) == 2
    rows = run(num_steps=3, mixture=mixture, save=str(tmp_path / "run"), resume="auto").rows
    assert [row.step for row in rows] == [3]


def step_and_lr(trained: Trained) -> dict[int, float]:
    return {row.step: row.lr for row in trained.rows}


def test_all_ranks_take_another_rate_save_and_stop(run: Any, tmp_path: Path) -> None:
    log, saves = tmp_path / "log.jsonl", tmp_path / "run"
    trained = run("steer", dp=2, save=str(saves), log=str(log))
    rates = step_and_lr(trained)
    assert trained.stopped is None
    assert list(rates) == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, rate in rates.items() if rate == 0.5] == [4, 5, 6, 7]
    assert [save.name for save in saves_in(saves)] == ["step-00000004", "step-00000007"]
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["own/square"] for row in logged] == [row.loss**2 for row in trained.rows]


def test_a_run_says_that_the_callback_stopped_it(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run("steer", save=str(tmp_path / "run"))
    assert capfd.readouterr().err.count("stopped after step 7 by the callback") == 1


def test_a_resumed_run_keeps_the_rate_until_the_callback_returns_to_the_schedule(run: Any, tmp_path: Path) -> None:
    saves = str(tmp_path / "run")
    run("steer", save=saves, num_steps=5)
    rates = step_and_lr(run("back", save=saves, resume="auto", num_steps=8))
    assert rates == {step: 0.5 for step in (6, 7, 8)}
    rates = step_and_lr(run("reads", save=saves, resume="auto", num_steps=9))
    assert rates == {9: 0.5}


def test_a_wrong_rate_is_refused_at_the_line_of_the_callback(run: Any) -> None:
    with pytest.raises(PlanError, match="a learning rate is a finite number, 0 or more") as caught:
        run("wrong")
    assert caught.value.where.line == CALLBACK.splitlines().index('    run.set_lr(float("nan"))') + 1


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda run: run.save(), "add --save DIR"),
        (lambda run: run.set_lr(-1.0), "0 or more"),
        (lambda run: run.log("loss", 1.0), "every row already has a figure of this name"),
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
def test_one_that_hangs_before_a_save_is_named_at_its_line_and_the_save_before_it_stays(
    run: Any, tmp_path: Path
) -> None:
    saves = tmp_path / "run"
    with pytest.raises(RankError, match=r"rank 0 .*: stuck for \d+ s at calls.py:\d+ in waits"):
        run("waits", dp=2, save=str(saves), save_every=1, timeout=SHORT_SECONDS)
    assert [save.name for save in saves_in(saves)] == ["step-00000001"]


def test_a_function_of_one_argument_gets_the_row_alone(run: Any, tmp_path: Path) -> None:
    row = StepRow(1, 2.0, 3.0, 0.1, 4.0)
    Callback(f"{tmp_path / 'calls.py'}:reads")(row, Run(1, has_saves=False, is_compared=False))
