"""``meshwright train --plan``: ranks run a saved plan. One of another spec, or an option that needs the model, is an
error before a rank starts."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from passes.errors import PlanError
from planner import plan
from planner.capture.model.init_log import InitLog
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime import Engine
from runtime.distributed.launch import launch
from runtime.engine.update import peak_bytes
from runtime.training.job import Job, differing, spec_of, stored_plan
from runtime.training.loop import run_rank
from runtime.training.options import AUTO
from runtime.training.run import largest_difference, train
from tests.tools.limits import HANG_SECONDS
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
    assert capfd.readouterr().err.count("MODEL has no weights: they are drawn by `initialization`") == 1


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
    assert error.what == f"--{name} runs the model itself, but a saved plan does not contain its code"


def test_a_plan_of_tables_alone_does_not_run(saved: Path) -> None:
    asked = replace(job(saved), plan="plan.json")
    assert "its name does not end in .pt" in refused(asked).what


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "num_key_value_heads": 2}
LARGE = SMALL | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 8192}
MIB = 1 << 20


def job_in(directory: Path, sizes: dict[str, Any], mesh: dict[str, int], **more: Any) -> Job:
    """Two steps of a Llama of these sizes."""
    config, text, spec = directory / "config.json", directory / "text.txt", directory / "spec.yaml"
    config.write_text(json.dumps(sizes | {"max_position_embeddings": 64}))
    text.write_bytes(bytes(random.Random(0).choices(range(32, 127), k=2000)))
    inputs = {"input_ids": {"shape": [8], "dtype": "int64", "high": 256}, "labels": {"like": "input_ids"}}
    spec.write_text(yaml.safe_dump({"mesh": mesh, "batch": {"global": 2, "micro": 1}, "inputs": inputs}))
    return replace(Job(f"hf:{config}", str(spec), str(text), 2, quiet=True), **more)


def peaks(job: Job, small: Job) -> tuple[int, int]:
    """Bytes above a process that has planned another model: before the engine is made, and of the whole run."""
    plan(load_model(small.model), small.spec)
    before = _reset_peak()
    seen: list[int] = []
    _noting(lambda: seen.append(peak_bytes(torch.device("cpu")) - before))
    run_rank(job)
    return seen[0], peak_bytes(torch.device("cpu")) - before


def _noting(note: Callable[[], None]) -> None:
    make: Any = Engine.__init__

    def noted(self: Engine, *args: Any, **kwargs: Any) -> None:
        note()
        make(self, *args, **kwargs)

    Engine.__init__ = noted


def _reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(torch.device("cpu"))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_rank_of_dp_holds_what_the_plan_says_and_one_parameter_more(tmp_path: Path):
    (tmp_path / "small").mkdir()
    job, small = job_in(tmp_path, LARGE, {"dp": 2}), job_in(tmp_path / "small", SMALL, {"dp": 2})
    decided = plan(load_model(job.model), job.spec)
    of_model = sum(4 * p.num_elements for p in decided.parameters)
    largest = max(4 * p.num_elements for p in decided.parameters)
    for planned, whole in launch(peaks, 2, job, small, timeout_seconds=HANG_SECONDS):
        assert planned < 24 * MIB < of_model / 4, (planned / MIB, of_model / MIB)
        assert whole < decided.memory[0].total + 2 * largest + 64 * MIB, (whole / MIB, decided.memory[0].total / MIB)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_the_ranks_begin_with_the_values_of_the_model_built_whole(tmp_path: Path, mesh: dict[str, int]):
    job = job_in(tmp_path, SMALL, mesh, compare=True)
    rows = launch(run_rank, 2, job, timeout_seconds=HANG_SECONDS)[0].rows
    assert len(rows) == 2
    assert largest_difference(rows) < 1e-6


def resumed_without_a_draw(job: Job) -> list[float]:
    def refuse(self: InitLog, numbers: list[int]) -> None:
        raise AssertionError("a resume draws weights that the save overwrites")

    InitLog.draw = refuse
    return [row.loss for row in run_rank(job).rows]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_resume_draws_nothing(tmp_path: Path):
    job = job_in(tmp_path, SMALL, {"dp": 2}, save=str(tmp_path / "saves"), save_every=1)
    whole = [row.loss for row in launch(run_rank, 2, job, timeout_seconds=HANG_SECONDS)[0].rows]
    assert len(whole) == 2
    for later in sorted(p for p in (tmp_path / "saves").iterdir() if p.name.endswith("2")):
        later.rename(tmp_path / "later")
    again = launch(resumed_without_a_draw, 2, replace(job, resume=AUTO), timeout_seconds=HANG_SECONDS)[0]
    assert again == whole[1:]
