"""What ranks tell each other with an update: another batch on one rank is one error on all, a slow rank is named."""

import json
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median_low
from typing import Any, get_type_hints

import pytest
import torch

from passes.errors import PlanError
from planner.mesh import Mesh
from planner.sharding.shards import NOTES_OF_A_RANK
from planner.spec.spec import Spec
from runtime.distributed.launch import launch
from runtime.distributed.meeting import Seat, judge
from runtime.distributed.messages import Notes, Told, digest_of
from runtime.distributed.opening import open_groups
from runtime.distributed.same_options import keys_of, require_same_options, told_to_all
from runtime.distributed.stopping import ORDERS
from runtime.evaluation.run import Evaluation, Weights, evaluate
from runtime.report.step_report import SlowRank, slowest
from runtime.training.job import OWN, Job
from runtime.training.run import train
from tests.tools.faulty_ranks import train_with_a_slow_rank, train_with_another_batch
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

CPU = torch.device("cpu")


def batch(*ids: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.tensor([ids]), "weight": torch.rand(3)}


def told(batches: list[dict[str, torch.Tensor]], are_local: list[bool]) -> tuple[str, set[bool]]:
    """Of dp 2 · tp 2: the words of the error, and what each rank's device says."""
    mesh = Mesh(tp=2, dp=2)
    ranks = [Notes(mesh, rank, CPU) for rank in range(4)]
    for rank, given, is_local in zip(ranks, batches, are_local, strict=True):
        rank.take(given, is_local=is_local)
    sums = torch.stack([rank.here(0) for rank in ranks]).sum(0)
    differ = {bool(rank.differ(sums)) for rank in ranks}
    try:
        ranks[0].check(sums.tolist(), step=5)
    except PlanError as error:
        return error.what, differ
    return "", differ


def test_digests_are_whole_numbers_of_the_integers_and_of_floats_alone_where_there_are_no_others():
    assert digest_of(batch(1, 2)) == digest_of(batch(1, 2)) == int(float(digest_of(batch(1, 2))))
    assert digest_of(batch(1, 2)) != digest_of(batch(2, 1))
    floats = torch.rand(5, 7)
    assert digest_of({"x": floats}) == digest_of({"x": floats.clone()}) != digest_of({"x": floats + 1})


def test_global_batches_are_alike_on_all_ranks_and_local_ones_on_those_of_one_place_on_dp():
    same, other = batch(1, 2), batch(3, 4)
    assert told([same] * 4, [False] * 4) == ("", {False})
    assert told([same, same, other, other], [True] * 4) == ("", {False})
    what, differ = told([same, same, other, same], [False] * 4)
    assert (what, differ) == (
        "the batch of step 5 is not the same on all ranks: rank 2 had another batch than rank 0",
        {True},
    )
    what, differ = told([same, same, other, same], [True] * 4)
    assert "rank 3 had another batch than rank 2" in what
    assert True in differ
    what, differ = told([same] * 4, [True, True, False, False])
    assert "some ranks passed local=True" in what
    assert differ == {True}


def _ops_of_python(call: Callable[[], object]) -> int:
    """How many it runs."""
    ops = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal ops
        frame.f_trace_opcodes = True
        ops += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return ops


def _spent(dp: int) -> dict[str, int]:
    notes = Notes(Mesh(dp=dp), 0, CPU)
    digests = [-1.0] * dp + [0.0] * (NOTES_OF_A_RANK - 1) * dp
    working = [1.0 + 0.01 * rank for rank in range(dp)]
    return {
        "at the start": _ops_of_python(lambda: Notes(Mesh(dp=dp), 0, CPU)),
        "a step's check": _ops_of_python(lambda: notes.check(digests, 1)),
        "a slow rank": _ops_of_python(lambda: slowest(working, notes.places)),
    }


def test_notes_cost_each_rank_the_same_however_many_there_are():
    few, many = _spent(16), _spent(64)
    assert {kind: ops for kind, ops in many.items() if ops > 5 * few[kind]} == {}


def test_the_slowest_of_many_replicas_is_that_of_comparing_each_with_all_others():
    drawn = random.Random(0)
    for _ in range(50):
        places = [(pp, dp) for dp in range(drawn.choice([1, 2, 5])) for pp in range(drawn.choice([1, 3]))]
        working = [drawn.choice([0.1, 0.2, 0.5, 1.0]) for _ in places]
        found = []
        for place, spent in zip(places, working, strict=True):
            others = [(p, w) for p, w in zip(places, working, strict=True) if p != place]
            replicas = [w for p, w in others if p[0] == place[0]]
            if others and spent >= (2.0 if replicas else 3.0) * median_low(replicas or [w for _, w in others]):
                found.append(spent - median_low(replicas or [w for _, w in others]))
        slow = slowest(working, places)
        assert (slow.seconds if slow else None) == max(found, default=None)


@pytest.mark.parametrize(
    ("working", "places", "found"),
    [
        ([0.1, 0.1, 0.31], [(0, 0), (0, 1), (0, 2)], SlowRank((2,), 3.1, 0.21)),
        ([0.1, 0.12, 0.1], [(0, 0), (0, 1), (0, 2)], None),
        ([0.1, 0.0, 0.5], [(0, 0), (0, 1), (0, 2)], None),
        ([0.5], [(0, 0)], None),
        ([], [], None),
        ([0.1, 0.5], [(0, 0), (0, 0)], None),  # two tp ranks: nothing to compare them with
        ([0.1, 0.1, 0.25, 0.25], [(0, 0), (0, 1), (1, 0), (1, 1)], None),
        ([0.1, 0.2, 0.4, 0.4], [(0, 0), (0, 1), (1, 0), (1, 1)], SlowRank((1,), 2.0, 0.1)),
        ([0.1, 0.1, 0.3, 0.3], [(0, 0), (0, 0), (0, 1), (0, 1)], SlowRank((2, 3), 3.0, 0.2)),
        ([0.1, 0.25], [(0, 0), (1, 0)], None),
        ([0.1, 0.1, 0.5], [(0, 0), (1, 0), (2, 0)], SlowRank((2,), 5.0, 0.4)),
    ],
)
def test_slow_ranks_work_longer_than_replicas_of_their_stage_or_much_longer_than_other_stages(working, places, found):
    assert str(slowest(working, places)) == str(found)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_slow_rank_is_named_with_its_cost_in_the_report():
    for slow_rank, usual in launch(train_with_a_slow_rank, 3, 1, 0.5, 12.0, timeout_seconds=HANG_SECONDS):
        assert slow_rank.ranks == (1,)
        assert slow_rank.seconds > 0.25  # of two forwards that sleep 0.5 s each
        assert slow_rank.factor > 1.5
        assert usual[1] == max(usual)


def errors_of(directory: Path, kind: str, at_step: int) -> list[str]:
    """Of each rank."""
    directory.mkdir()
    with pytest.raises(PlanError):
        launch(train_with_another_batch, 2, 1, at_step, kind, str(directory), timeout_seconds=HANG_SECONDS)
    return [(directory / str(rank)).read_text() for rank in range(2)]


@pytest.mark.slow
def test_another_batch_on_one_rank_is_one_error_on_all_ranks_at_once(tmp_path):
    cases = [("none", 0), ("a list", 2), ("other keys", 2), ("other shape", 0), ("other dtype", 2), ("other rows", 2)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda case: errors_of(tmp_path / f"{case[0]} {case[1]}", *case), cases))
    for case, (usual, odd) in zip(cases, found, strict=True):
        assert odd.splitlines()[0] in usual, case


def test_each_rank_reads_what_the_others_have_told():
    mesh = Mesh(tp=1, dp=2, pp=2)
    ranks = [Notes(mesh, rank, CPU) for rank in range(4)]
    given = [(rank + 1.0, rank + 0.25, rank + 0.5, 1e9 * (rank + 1)) for rank in range(4)]
    sums = torch.stack([rank.here(r == 2, own) for r, (rank, own) in enumerate(zip(ranks, given, strict=True))]).sum(0)
    found = Told.of(sums.tolist())
    assert found.stop_requested
    rows = zip(found.usual_seconds, found.working_seconds, found.pipeline_seconds, found.memory_bytes, strict=True)
    assert list(rows) == given
    assert (ranks[0].places, ranks[0].pipelines) == ([(0, 0), (0, 1), (1, 0), (1, 1)], [0, 1, 0, 1])
    assert Told.of([]) == Told()


@pytest.mark.parametrize(("stops", "orders"), [(0, False), (3, False), (0, True), (4, True)])
def test_orders_of_rank_0_and_stops_of_any_rank_are_told_apart(stops: int, orders: bool) -> None:
    mesh = Mesh(dp=4)
    asks = [int(rank < stops) + (ORDERS if orders and rank == 0 else 0) for rank in range(4)]
    sums = torch.stack([Notes(mesh, rank, CPU).here(asks[rank]) for rank in range(4)]).sum(0)
    told = Told.of(sums.tolist())
    assert (told.stop_requested, told.has_orders) == (stops > 0, orders)


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


def refusals(jobs: list[Any], others: list[Any]) -> list[str]:
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
    first, second = Ranks(2, "processes").run(refusals, jobs, others)
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
    first, second = Ranks(2, "processes").run(refusals, [job], [replace(JOB, spec=spec)])
    assert first == second
    assert first[0].startswith("rank 0: cannot write the log")
