"""Drawn cases equal one process; a fault that is planted is found, shrunk and runs again from its file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import runtime.fuzz.run
from planner.spec.spec import Spec
from runtime.cli import app
from runtime.fuzz import models, specs
from runtime.fuzz.campaign import Campaign
from runtime.fuzz.case import Case
from runtime.fuzz.prepare import prepare
from runtime.fuzz.run import Outcome, Verdict
from runtime.fuzz.shrink import shrunk
from runtime.verify.mutants import num_collectives, without_collective

SIMPLEST = Case({n: v[0] for n, v in models.FIELDS.items()}, {n: v[0] for n, v in specs.FIELDS.items()})


@given(st.integers(0, 1 << 32), st.integers(2, 8))
def test_a_drawn_case_is_a_spec_of_at_most_so_many_ranks(seed, most_ranks):
    case = Case.drawn(seed, most_ranks)
    assert case == Case.drawn(seed, most_ranks)
    assert case.world_size <= most_ranks
    spec = Spec.load(case.to_spec())
    assert spec.batch.global_size == case.spec["microbatches"] * case.spec["batch.micro"] * case.spec["mesh.dp"]


def test_a_case_comes_back_from_its_file(tmp_path: Path):
    for seed in range(20):
        case = Case.drawn(seed, 4)
        case.save(tmp_path / "case.json")
        assert Case.load(tmp_path / "case.json") == case


def test_shrinking_ends_at_the_fields_that_a_failure_needs():
    def run(case: Case) -> Outcome:
        fails = case.spec["mesh.tp"] > 1 and case.model["norm"] == "rms"
        return Outcome(Verdict.DIFFERS if fails else Verdict.EQUAL)

    first = next(c for c in (Case.drawn(seed, 4) for seed in range(10_000)) if run(c).verdict is Verdict.DIFFERS)
    *_, (smallest, _) = shrunk(first, run(first), run, 4)
    assert str(smallest) == "model: norm rms; spec: mesh.tp 2"


@pytest.mark.thorough
@pytest.mark.slow
def test_drawn_cases_are_equal_or_refused_with_a_place(tmp_path: Path):
    prepare()
    campaign = Campaign(1000, 4, tmp_path, print)
    campaign.run(6, None)
    assert not campaign.failures
    assert sum(n for (verdict, _), n in campaign.counts.items() if verdict is Verdict.EQUAL) >= 3


@pytest.mark.slow
def test_a_missing_collective_is_found_and_its_file_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = runtime.fuzz.run.run_beside

    def mutated(decided: Any, batches: Any, make: Any) -> Any:
        program = without_collective(decided, int(os.environ["RANK"]), 0) if num_collectives(decided) else None
        return whole(decided, batches, make, program=program)

    prepare()
    monkeypatch.setattr(runtime.fuzz.run, "run_beside", mutated)
    campaign = Campaign(0, 2, tmp_path, print)
    case = Case(SIMPLEST.model | {"layers": 1}, SIMPLEST.spec | {"mesh.tp": 2})
    outcome = campaign.outcome_of(case)
    assert outcome.verdict is Verdict.DIFFERS
    assert "step 1" in outcome.words
    monkeypatch.undo()
    case.save(tmp_path / "case.json")
    again = CliRunner().invoke(app, ["fuzz", "--case", str(tmp_path / "case.json")])
    assert (again.exit_code, again.stdout.splitlines()[0]) == (0, "equal")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc", "1"], "a case of one rank"),
        (["--folder", "/none/such"], "no such directory"),
        (["--case", "/none/such"], "/none/such"),
        (["--case", "{damaged}"], "no case of this version"),
    ],
)
def test_bad_input_is_one_error(tmp_path: Path, options: list[str], words: str):
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({"version": 1, "model": {}}))
    result = CliRunner().invoke(app, ["fuzz", *(option.format(damaged=damaged) for option in options)])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output
