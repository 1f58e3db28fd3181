"""What ranks tell each other with an update: another batch on one rank is one error on all, a slow rank is named."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
import torch

from passes.errors import PlanError
from planner.mesh import Mesh
from planner.sharding.shards import NOTES_OF_A_RANK
from runtime.distributed.launch import launch
from runtime.distributed.messages import Notes, Told, digest_of
from runtime.distributed.stopping import ORDERS
from runtime.report.step_report import SlowRank, slowest
from tests.tools.faulty_ranks import train_with_a_slow_rank, train_with_another_batch
from tests.tools.limits import HANG_SECONDS

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
