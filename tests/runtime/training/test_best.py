"""The best save, early stop, callbacks and Weights & Biases: a run of one process each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from planner import PlanError
from runtime.checkpoint.saves import saves_in
from runtime.training.job import Job, Trained
from runtime.training.run import train

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
from pathlib import Path

def note(row):
    with Path(__file__).with_name("rows").open("a") as file:
        file.write(json.dumps([row.step, row.loss, row.validation_loss]) + "\\n")

def fail(row):
    if row.step == 2:
        raise KeyError("no such figure")
"""
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
    (tmp_path / "packages").mkdir()
    for name, text in (("tokens.py", MODEL), ("calls.py", CALLBACK), ("packages/wandb.py", WANDB)):
        (tmp_path / name).write_text(text)
    (tmp_path / "text.txt").write_text("all that is said here is said once more, and then again. " * 200)

    def with_options(lr: str = "3.0e-2", min_lr: str = "0.0", **options: Any) -> Trained:
        (tmp_path / "spec.yaml").write_text(SPEC % (lr, min_lr))
        model, spec, data = f"{tmp_path / 'tokens.py'}:Tokens", str(tmp_path / "spec.yaml"), str(tmp_path / "text.txt")
        return train(Job(model, spec, data, **{"num_steps": 8, "quiet": True, **options}))

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
    trained = run(num_steps=3, validate_every=2, callback=f"{tmp_path / 'calls.py'}:note", wandb="tokens")
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
        run(num_steps=3, callback=f"{tmp_path / 'calls.py'}:fail")
    assert (Path(error.value.where.file).name, error.value.where.code) == (
        "calls.py",
        'raise KeyError("no such figure")',
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("options", "what", "where"),
    [
        ({"callback": "calls.py"}, "--callback 'calls.py' has an unknown form", "--callback"),
        ({"callback": "{}/calls.py:none"}, "no 'none' in calls", None),
        ({"wandb": "p"}, "needs the package wandb", "--wandb"),
        ({"keep_best": True, "save": "{}/run"}, "needs a validation loss", "--keep-best"),
        ({"patience": 2}, "needs a validation loss", "--patience"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused_before_the_run(run, tmp_path, options, what, where):
    given = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(PlanError, match=what) as error:
        run(**given)
    assert where is None or error.value.where == where


@pytest.mark.thorough
def test_a_mixture_of_texts_trains_and_names_both_in_its_saves(run, tmp_path):
    (tmp_path / "other.txt").write_text("0123456789" * 400)
    mixture = ((str(tmp_path / "text.txt"), 3.0), (str(tmp_path / "other.txt"), 1.0))
    assert len(run(num_steps=2, mixture=mixture, validate_every=2, save=str(tmp_path / "run")).rows) == 2
    rows = run(num_steps=3, mixture=mixture, save=str(tmp_path / "run"), resume="auto").rows
    assert [row.step for row in rows] == [3]
