"""Cases of drawn models equal one process; a planted fault is found, shrunk and runs again from its file."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import runtime.engine.engine
import runtime.fuzz.run
import runtime.optimizer.main_shards
import runtime.profiling.memory
import runtime.verify.run
from passes.errors import PlanError, Where
from planner.spec.spec import Spec
from runtime.cli import app
from runtime.fuzz import specs
from runtime.fuzz.campaign import Progress, shrunk
from runtime.fuzz.case import Case
from runtime.fuzz.forks import ForkError, prepare
from runtime.fuzz.run import Outcome, Verdict, _last_line, refused
from runtime.verify.mutants import num_collectives, without_collective
from tests.fuzz.__main__ import main
from tests.fuzz.drawing import campaign_of, case_with, drawn_case, read_case


@given(st.integers(0, 1 << 32), st.integers(2, 8))
def test_a_drawn_case_is_a_spec_of_at_most_so_many_ranks(seed, most_ranks):
    case = drawn_case(seed, most_ranks)
    assert case == drawn_case(seed, most_ranks)
    assert case.world_size <= most_ranks
    spec = Spec.load(case.to_spec())
    assert spec.batch.global_size == case.spec["microbatches"] * case.spec["batch.micro"] * case.spec["mesh.dp"]


def test_a_case_comes_back_from_its_file(tmp_path: Path):
    for seed in range(20):
        case = drawn_case(seed, 4)
        case.save(tmp_path / "case.json")
        assert read_case(tmp_path / "case.json") == case


def test_shrinking_ends_at_the_fields_that_a_failure_needs():
    def run(case: Case) -> Outcome:
        fails = case.spec["mesh.tp"] > 1 and case.model.chosen["norm"] == "rms"
        return Outcome(Verdict.DIFFERS if fails else Verdict.EQUAL)

    first = next(c for c in (drawn_case(seed, 4) for seed in range(10_000)) if run(c).verdict is Verdict.DIFFERS)
    *_, (smallest, _) = shrunk(first, run(first), run, 4)
    assert str(smallest) == "model: norm rms; spec: mesh.tp 2"


@pytest.mark.thorough
@pytest.mark.slow
def test_drawn_cases_are_equal_or_refused_with_a_place(tmp_path: Path):
    prepare()
    campaign = campaign_of(1000, 4, tmp_path)
    campaign.run(6, None)
    assert not campaign.failures
    assert sum(n for (verdict, _), n in campaign.counts.items() if verdict is Verdict.EQUAL) >= 3


@pytest.mark.thorough
@pytest.mark.slow
def test_a_missing_collective_is_found_and_its_file_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = runtime.verify.run.run_beside

    def mutated(decided: Any, *args: Any, **options: Any) -> Any:
        program = without_collective(decided, int(os.environ["RANK"]), 0) if num_collectives(decided) else None
        return whole(decided, *args, program=program, **options)

    prepare()
    monkeypatch.setattr(runtime.verify.run, "run_beside", mutated)
    campaign = campaign_of(0, 2, tmp_path)
    case = case_with({"layers": 1}, {"mesh.tp": 2})
    outcome = campaign.outcome_of(case)
    assert outcome.verdict is Verdict.DIFFERS
    assert "step 1" in outcome.words
    assert "gradient tokens.weight" in outcome.words
    monkeypatch.undo()
    case.save(tmp_path / "case.json")
    command = typer.Typer()
    command.command()(main)
    again = CliRunner().invoke(command, ["--case", str(tmp_path / "case.json")])
    assert (again.exit_code, again.stdout.splitlines()[0]) == (0, "equal")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["one", "tp", "pp", "dp", "cp"])
def test_another_layout_goes_on_from_a_save(axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = case_with({}, {"mesh.dp": 2, "continued on": axis})
    prepare()
    campaign = campaign_of(0, 2, tmp_path)
    assert campaign.outcome_of(case) == Outcome(Verdict.EQUAL)
    whole = runtime.engine.engine.Engine.load

    def with_the_next_rate(engine: Any, directory: Any) -> Any:
        found = whole(engine, directory)
        engine.running.step_index = 0
        return found

    monkeypatch.setattr(runtime.engine.engine.Engine, "load", with_the_next_rate)
    decayed = replace(case, spec=case.spec | {"optimizer.schedule.kind": "linear"})
    outcome = campaign.outcome_of(decayed)
    assert (outcome.verdict, outcome.check) == (Verdict.DIFFERS, "continued")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_wrong_forecast_of_memory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = case_with({}, {"mesh.pp": 2})
    prepare()
    campaign = campaign_of(0, 2, tmp_path)
    assert campaign.outcome_of(case) == Outcome(Verdict.EQUAL)
    monkeypatch.setattr(runtime.profiling.memory, "registered_bytes", lambda engine: 100_000)
    outcome = campaign.outcome_of(case)
    assert (outcome.verdict, outcome.check) == (Verdict.DIFFERS, "memory")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_running_mean_that_is_none_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = case_with({}, {"mesh.dp": 2, "optimizer.ema": 0.9})
    prepare()
    campaign = campaign_of(0, 2, tmp_path)
    assert campaign.outcome_of(case) == Outcome(Verdict.EQUAL)
    monkeypatch.setattr(runtime.optimizer.main_shards.WeightAverage, "update", lambda self, found_inf: None)
    assert "mean" in campaign.outcome_of(case).words


def test_a_refusal_names_a_line_or_a_key():
    assert refused(PlanError("x", where=Where("blocks.0", "model.py", 3), fix="y")).verdict is Verdict.REFUSED
    assert refused(PlanError("x", where="mesh.tp", fix="y")).verdict is Verdict.REFUSED
    for where in (None, "", Where("blocks.0"), "somewhere"):
        assert refused(PlanError("x", where=where, fix="y")).verdict is Verdict.CRASHED
    assert refused(PlanError("x", where="mesh.tp", fix="")).verdict is Verdict.CRASHED


def test_an_interrupt_keeps_the_smallest_case_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    campaign, runs = campaign_of(0, 4, tmp_path), iter(range(100))

    def outcomes_of(cases: list[Case]) -> Iterator[Outcome]:
        for _ in cases:
            if next(runs) == 3:
                raise KeyboardInterrupt
            yield Outcome(Verdict.DIFFERS, "all of it", "values")

    monkeypatch.setattr(campaign, "outcomes_of", outcomes_of)
    campaign.run(5, None)
    assert campaign.rows() == [("1", "differs", "values")]
    assert read_case(tmp_path / "fuzz-0.json") == campaign.failures[0].case


@given(st.integers(0, 1 << 32), st.integers(1, 9))
def test_cases_of_one_model_share_what_a_capture_depends_on(seed: int, number: int):
    first = drawn_case(seed, 4)
    other = first.another(seed, number, 4)
    assert other == first.another(seed, number, 4)
    assert other.model == first.model
    assert [other.spec[name] for name in specs.OF_CAPTURES] == [first.spec[name] for name in specs.OF_CAPTURES]


def test_a_crash_is_named_by_its_exception():
    text = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
passes.base.PassError: after the pass localize this does not hold of stage 0
  expected: 0 all_reduce
This is a bug in meshwright, not of your model or spec: please report it, with this message."""
    assert _last_line(ForkError(text)).startswith("ForkError: passes.base.PassError: after the pass localize")
    assert _last_line(ForkError("not finished in 1 s")) == "ForkError: not finished in 1 s"


@pytest.mark.thorough
@pytest.mark.slow
def test_a_case_that_ends_its_process_is_a_crash_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ending, whole = case_with({}, {"mesh.dp": 2}), runtime.fuzz.run.plan

    def ended(captured: Any, spec: Spec) -> Any:
        return os._exit(3) if spec.mesh.dp == 2 else whole(captured, spec)

    prepare()
    monkeypatch.setattr(runtime.fuzz.run, "plan", ended)
    following = case_with({}, {"mesh.pp": 2})
    found = list(campaign_of(0, 2, tmp_path).outcomes_of([ending, following]))
    assert [outcome.verdict for outcome in found] == [Verdict.CRASHED, Verdict.EQUAL]
    assert "without a result" in found[0].words


def test_progress_tells_what_is_left():
    progress = Progress(4, None)
    assert [progress.is_over(done) for done in (3, 4)] == [False, True]
    assert progress.told(2).startswith("2 of 4 done, about ")
    timed = Progress(None, 100.0)
    assert not timed.is_over(1000)
    assert 90 < timed.seconds_left(1) <= 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc", "1"], "at least 2 ranks"),
        (["--folder", "/none/such"], "directory not found"),
        (["--case", "/none/such"], "/none/such"),
        (["--case", "{damaged}"], "not a case of this version"),
        ([], "MODEL is missing"),
        (["--minutes", "10"], "MODEL is missing"),
        (["m.py:build"], "SPEC is missing, which describes the inputs"),
        (["m.py:build", "--case", "x.json"], "cannot be combined with MODEL"),
    ],
)
def test_bad_input_is_one_error(tmp_path: Path, options: list[str], words: str):
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({"version": 1, "model": {}}))
    result = CliRunner().invoke(app, ["fuzz", *(option.format(damaged=damaged) for option in options)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output
