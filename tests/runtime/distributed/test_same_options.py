"""Options that change the order of exchanges are compared before ranks begin; those of one rank alone may differ."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

import pytest

from passes.errors import PlanError
from runtime.distributed.launch import launch
from runtime.evaluation.run import Evaluation, evaluate
from runtime.train import train
from runtime.training.job import OWN, Job
from tests.tools.limits import HANG_SECONDS

NONE = "spec.yaml"  # none is there: the next thing that a rank reads
JOB = Job("model.py:build", NONE, "stdlib", 4, timeout=HANG_SECONDS)
OTHER: dict[str, Any] = {  # of rank 1
    field.name: {"str": "other", "int": 5, "float": 9.0, "bool": True}.get(str(field.type).partition(" ")[0], ("x",))
    for field in fields(Job)
}


def errors_of(jobs: list[Any], others: list[Any]) -> list[str]:
    """The error of each run, on this rank."""
    found = []
    for asked in others if os.environ["RANK"] == "1" else jobs:
        with pytest.raises(PlanError) as caught:
            train(asked) if isinstance(asked, Job) else evaluate(asked)
        found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_each_option_that_changes_exchanges_is_refused_on_all_ranks_by_name() -> None:
    names = sorted({field.name for field in fields(Job)} - {"spec"})
    jobs: list[Any] = [*(JOB for _ in names), Evaluation("model.py:build", NONE, "stdlib")]
    others = [*(replace(JOB, **{name: OTHER[name]}) for name in names), replace(jobs[-1], is_cloze=True)]
    first, second = launch(errors_of, 2, jobs, others, timeout_seconds=HANG_SECONDS)
    assert len(first) == len(jobs)
    for name, told, of_rank_1 in zip([*names, "cloze"], first, second, strict=True):
        if name in OWN:
            assert NONE in told
            continue
        assert told == of_rank_1, name
        option = f"--{name.removeprefix('num_').replace('_', '-')}"
        assert told.startswith(f"{option} differs between ranks: rank 1 of 2"), told


@pytest.mark.slow
def test_an_error_of_rank_0_about_its_own_files_is_that_of_all() -> None:
    job = replace(JOB, log="no/such/directory/log")
    first, second = launch(errors_of, 2, [job], [JOB], timeout_seconds=HANG_SECONDS)
    assert first == second
    assert first[0].startswith("rank 0: cannot write the log")
