"""Options that change the order of exchanges are compared before ranks begin; those of one rank alone may differ."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from passes.errors import PlanError
from planner.mesh import Mesh
from planner.spec.spec import Spec
from runtime.distributed.meeting import Seat, judge
from runtime.distributed.opening import open_groups
from runtime.distributed.same_options import keys_of, require_same_options, told_to_all
from runtime.evaluation.run import Evaluation, Weights, evaluate
from runtime.training.job import OWN, Job
from runtime.training.run import train
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

NONE = "no_such_model.py:build"  # the next thing that a rank reads after the options
JOB = Job(NONE, "spec.yaml", "stdlib", 4, timeout=HANG_SECONDS)
_OTHER = {str: "other", int: 5, float: 9.0, bool: True, str | None: "other", int | None: 5}
OTHER: dict[str, Any] = {name: _OTHER.get(kind, ("x",)) for name, kind in get_type_hints(Job).items()}  # of rank 1


SPEC: dict[str, Any] = {
    "mesh": {"dp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"ids": {"shape": [16], "dtype": "int64", "high": 9}},
    "optimizer": {"lr": 1e-3},
}


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "spec.yaml").write_text(json.dumps(SPEC))
    return str(tmp_path / "spec.yaml")


@dataclass(frozen=True)
class Options:
    """Those of a command without a spec."""

    steps: int = 3


def errors_of(jobs: list[Any], others: list[Any]) -> list[str]:
    """The error of each run, on this rank."""
    found = []
    for asked in others if os.environ["RANK"] == "1" else jobs:
        with pytest.raises(PlanError) as caught:
            train(asked) if isinstance(asked, Job) else evaluate(asked)
        found.append(str(caught.value))
    return found


@pytest.mark.slow
def test_each_option_that_changes_exchanges_is_refused_on_all_ranks_by_name(spec: str) -> None:
    names = sorted({field.name for field in fields(Job)} - {"spec"})
    job = replace(JOB, spec=spec)
    jobs: list[Any] = [*(job for _ in names), Evaluation(Weights(NONE), spec, "stdlib")]
    others = [*(replace(job, **{name: OTHER[name]}) for name in names), replace(jobs[-1], is_cloze=True)]
    first, second = Ranks(2, "processes").run(errors_of, jobs, others)
    assert len(first) == len(jobs)
    for name, told, of_rank_1 in zip([*names, "cloze"], first, second, strict=True):
        if name in OWN:
            assert "at:  MODEL" in told
            continue
        assert told == of_rank_1, name
        option = f"--{name.removeprefix('num_').replace('_', '-')}"
        assert told.startswith(f"{option} differs between ranks: rank 1 of 2"), told


CHANGED = {
    "mesh.dp": {"mesh": {"tp": 2}},
    "batch.micro": {"batch": {"global": 4, "micro": 1}},
    "inputs.ids.high": {"inputs": {"ids": {"shape": [16], "dtype": "int64", "high": 8}}},
    "optimizer.lr": {"optimizer": {"lr": 2e-3}},
    "optimizer.bucket_size": {"optimizer": {"lr": 1e-3, "bucket_size": 64}},
    "seed": {"seed": 5},
    "recompute": {"recompute": "full"},
    "audit.every": {"audit": {"every": 2}},
    "data.validation": {"data": {"validation": 0.1}},
    "loss": {"loss": "b/file.py:other"},
}


@pytest.mark.parametrize("key", CHANGED)
def test_a_key_of_the_spec_that_differs_is_named(key: str):
    """Ranks of a host run the plan of their first rank: another spec of theirs would be ignored."""
    seats = [Seat(identity=keys_of(Spec.load(values))) for values in (SPEC, SPEC, SPEC | CHANGED[key])]
    with pytest.raises(PlanError, match=f"^{key} of the spec differs between ranks: rank 2 of 3"):
        judge(seats, 1)


def test_hosts_may_have_the_files_of_a_spec_in_other_directories():
    first, second = (keys_of(Spec.load(SPEC | {"loss": f"{at}/file.py:function"})) for at in ("/home/one", "/data/two"))
    assert first == second


def fails_before_groups(failing: int) -> str:
    require_same_options(Options())
    try:
        with told_to_all():
            if os.environ["RANK"] == str(failing):
                raise PlanError("no text", where="--data", fix="give one")
            open_groups(Mesh(dp=2), {}, [], timeout_seconds=HANG_SECONDS)
    except PlanError as error:
        return str(error)
    return "open"


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_before_there_are_groups_is_that_of_the_ranks_that_wait(failing: int):
    told = Ranks(2, "processes").run(fails_before_groups, failing)
    assert told[failing] == "no text\n  at:  --data\n  fix: give one"
    assert told[1 - failing] == f"rank {failing}: {told[failing]}"


@pytest.mark.slow
def test_an_error_of_rank_0_about_its_own_files_is_that_of_all(spec: str) -> None:
    job = replace(JOB, spec=spec, log="no/such/directory/log")
    first, second = Ranks(2, "processes").run(errors_of, [job], [replace(JOB, spec=spec)])
    assert first == second
    assert first[0].startswith("rank 0: cannot write the log")
