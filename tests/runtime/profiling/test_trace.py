"""One trace of what all ranks did: every action of the plan once a step, in its order, planned beside measured."""

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from passes.errors import PlanError
from planner import plan
from planner.capture.model.reference import load_model
from planner.fold import stage_of
from planner.mesh import Mesh
from planner.pipeline.links import Message, received_by
from planner.pipeline.schedule import Order, build_schedule
from planner.pipeline.simulate import simulate
from runtime.distributed.faults.activity import BETWEEN, LAST_SENDS, Now
from runtime.distributed.launch import launch
from runtime.profiling import profile
from runtime.profiling.profile import Offset, Window, profile_of
from runtime.profiling.trace import MEASURED, PLANNED, Change, PlannedRun, Waited, planned_run, spans_of
from runtime.training.job import Job
from runtime.training.loop import run_rank
from tests.tools.limits import HANG_SECONDS

ROUNDING = 2e-3  # microseconds: of two ends
ACTIONS = ("forward", "backward", "weight gradient")  # categories
Event = dict[str, Any]


def tracks(trace: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    """The spans of each rank's two tracks."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def check_trace(trace: dict[str, Any], orders: Sequence[Order], mesh: Mesh, steps: Sequence[int]) -> None:
    """Both tracks of every rank have each action of the plan once a step, in its order, and their spans nest."""
    found = tracks(trace)
    assert sorted(found) == [(rank, track) for rank in range(mesh.world_size) for track in (MEASURED, PLANNED)]
    for (rank, track), events in found.items():
        wanted = [str(action) for action in orders[mesh.coordinate(rank)["pp"]]]
        check_nesting(events)
        for step in steps:
            actions = [e for e in events if e["args"].get("step") == step and e["cat"] in ACTIONS]
            assert [e["name"] for e in actions] == wanted, (rank, track, step)
            assert all(b["ts"] >= a["ts"] + a["dur"] - ROUNDING for a, b in pairwise(actions))
        assert {e["args"]["step"] for e in events if "step" in e["args"]} == {*steps}


def check_nesting(events: Sequence[Event]) -> None:
    """Each span lies in the one that is open when it begins, or after it."""
    open_ends: list[float] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        assert event["dur"] >= 0, event
        while open_ends and start >= open_ends[-1] - ROUNDING:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + ROUNDING, event
        open_ends.append(end)


def check_causes(trace: dict[str, Any], num_arrows: int) -> None:
    """Messages arrive after the action that sends them has begun, but for what clocks may be apart."""
    error = 1e6 * trace["otherData"]["clocks differ by at most (seconds)"]
    begun = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ended = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert begun.keys() == ended.keys()
    assert len(begun) == num_arrows
    for number, sent in begun.items():
        source = next(
            e
            for e in tracks(trace)[sent["pid"], MEASURED]
            if e["cat"] in ("forward", "backward") and e["ts"] <= sent["ts"] <= e["ts"] + e["dur"]
        )
        assert ended[number]["ts"] >= source["ts"] - error


MODEL = """
import torch
from examples.gpt import GPT

def build():
    torch.manual_seed(0)
    return GPT(length=8, width=16, num_layers=4, num_heads=2)
"""


def crosses(message: Message, schedule: Any) -> bool:
    is_inside = 0 <= message.boundary < schedule.num_stages - 1
    return is_inside and message.link(schedule.pp, schedule.fold) is not None


def lived(schedule: Any, rank: int, step: int, begun: float) -> tuple[list[Change], list[Waited]]:
    """What a rank was at in a step that goes as it was simulated, each unit of time taking a second."""
    spans = simulate(schedule).spans[rank]
    changes: list[Change] = [(Now("batch", step, 0.0), begun), (Now("forward", step, 0.0), begun + 0.25)]
    waits, free = list[Waited](), 0.5
    for action, (start, end) in zip(schedule.orders[rank], spans, strict=True):
        stage = stage_of(rank, action.chunk, schedule.pp, schedule.fold)
        changes.append((Now("batch", step, 0.0, stage, action), begun + free))
        message = received_by(action.kind, stage, action.microbatch)
        if action.kind != "W" and crosses(message, schedule):
            waits.append((message, begun + free, begun + 0.5 + start))
        free = 0.5 + end
    changes.append((Now("sum of gradients", step, 0.0), begun + free))
    changes.append((Now(BETWEEN, step, 0.0), begun + free + 1.0))
    return changes, waits


def as_planned(schedule: Any) -> PlannedRun:
    run = simulate(schedule)
    rows = zip(schedule.orders, run.spans, strict=True)
    actions = tuple(tuple((a, *s) for a, s in zip(order, spans, strict=True)) for order, spans in rows)
    return PlannedRun(actions, run.duration, False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "pp", "vpp"),
    [("gpipe", 4, 1), ("1f1b", 4, 1), ("1f1b", 1, 1), ("interleaved_1f1b", 2, 3), ("zero_bubble_v", 2, 2)],
)
def test_a_run_that_goes_as_planned_has_equal_tracks(kind, pp, vpp):
    schedule = build_schedule(kind, pp, 4, vpp)
    mesh = Mesh(tp=2, pp=pp, vpp=vpp, fold=schedule.fold)
    found = []
    for rank in range(mesh.world_size):
        steps = [lived(schedule, mesh.coordinate(rank)["pp"], step, 1000.0 * (step + 1)) for step in (3, 4)]
        changes, waits = ([*a, *b] for a, b in zip(*steps, strict=True))
        found.append((spans_of(changes, waits), Offset(0.0, 0.0)))
    trace = json.loads(json.dumps(profile_of(found, as_planned(schedule), mesh)))
    check_trace(trace, schedule.orders, mesh, [4, 5])
    crossing = sum(crosses(Message("F", cut, 0), schedule) for cut in range(pp * vpp - 1)) * 2 * 4
    check_causes(trace, 2 * mesh.tp * crossing)
    ends = {
        (rank, track): {(e["args"]["step"], e["name"]): e["ts"] + e["dur"] for e in events if "chunk" in e["args"]}
        for (rank, track), events in tracks(trace).items()
    }
    for rank in range(mesh.world_size):
        assert ends[rank, MEASURED] == pytest.approx(ends[rank, PLANNED])


def test_a_step_is_told_apart_from_other_calls_and_its_phases_lie_in_it():
    at = [
        (BETWEEN, 1.0), ("batch", 2.0), ("denominators", 3.0), ("forward", 4.0), ("update", 6.0), (BETWEEN, 7.0),
        ("save", 8.0), (BETWEEN, 9.0),
    ]  # fmt: skip
    spans = spans_of([(Now(phase, 4, 0.0), seconds) for phase, seconds in at], [(None, 4.5, 5.0)])
    assert [(span.name, span.kind, span.start, span.end, span.step) for span in spans] == [
        ("between steps", "call", 1.0, 2.0, 0),
        ("step 5", "step", 2.0, 7.0, 5),
        ("check batch", "phase", 2.0, 3.0, 5),
        ("denominators", "phase", 3.0, 4.0, 5),
        ("begin", "phase", 4.0, 6.0, 5),
        ("wait", "wait", 4.5, 5.0, 0),
        ("update", "phase", 6.0, 7.0, 5),
        ("between steps", "call", 7.0, 8.0, 0),
        ("save", "call", 8.0, 9.0, 0),
        ("save", "phase", 8.0, 9.0, 0),
    ]


def test_an_action_of_another_place_in_the_order_is_seen():
    schedule = build_schedule("1f1b", 2, 2)
    mesh = Mesh(pp=2)
    found = [(spans_of(*lived(schedule, rank, 0, 0.0)), Offset(0.0, 0.0)) for rank in range(2)]
    spans, offset = found[1]
    action = next(i for i, span in enumerate(spans) if span.name == "B0.0")
    found[1] = ([span._replace(name="B1.0") if i == action else span for i, span in enumerate(spans)], offset)
    with pytest.raises(AssertionError):
        check_trace(profile_of(found, as_planned(schedule), mesh), schedule.orders, mesh, [1])


def test_spans_that_overlap_are_seen():
    inside = {"ts": 0.0, "dur": 5.0}, {"ts": 1.0, "dur": 2.0}, {"ts": 3.0, "dur": 2.0}
    check_nesting(inside)
    with pytest.raises(AssertionError):
        check_nesting((*inside, {"ts": 4.0, "dur": 2.0}))


@pytest.mark.thorough
def test_the_plan_has_seconds_where_a_cluster_is_named_and_else_units_that_are_scaled(tmp_path):
    files = written(tmp_path, {"pp": 2})
    decided = plan(load_model(files[0]), files[1])
    units = planned_run(decided, None)
    assert not units.has_seconds
    assert units.scaled(3.0).duration == pytest.approx(3.0)
    assert units.scaled(3.0).actions[1][-1][2] == pytest.approx(3.0 * units.actions[1][-1][2] / units.duration)
    files = written(tmp_path, {"pp": 2}, cluster="h200")
    decided = plan(load_model(files[0]), files[1])
    assert decided.cost is not None
    seconds = planned_run(decided, "h200")
    assert seconds.has_seconds
    assert seconds.scaled(3.0) is seconds
    assert 0 < seconds.duration < decided.cost.step_seconds
    assert [[a for a, *_ in rank] for rank in seconds.actions] == [list(order) for order in decided.schedule.orders]


def written(directory: Path, mesh: dict[str, int], **more: Any) -> tuple[str, str, str]:
    """Model, spec and data."""
    (directory / "model.py").write_text(MODEL)
    (directory / "text.txt").write_bytes(bytes(random.Random(0).choices(range(32, 127), k=4000)))
    spec = {
        "mesh": mesh,
        "batch": {"global": 8, "micro": 2},
        "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 256}, "targets": {"like": "input_ids"}},
        "optimizer": {"lr": 1e-2},
    } | more
    (directory / "spec.yaml").write_text(yaml.safe_dump(spec))
    return f"{directory / 'model.py'}:build", str(directory / "spec.yaml"), str(directory / "text.txt")


def profiled(directory: Path, mesh: dict[str, int], steps: str, **more: Any) -> Job:
    return Job(*written(directory, mesh, **more), 5, profile=steps, profile_to=str(directory / "trace.json"))


def orders_of(job: Job) -> tuple[Any, Mesh]:
    decided = plan(load_model(job.model), job.spec)
    return decided.schedule.orders, decided.mesh


@pytest.mark.thorough
def test_a_run_of_one_process_is_traced(tmp_path, capsys):
    job = profiled(tmp_path, {}, "3:4")
    run_rank(job)
    assert f"trace of 2 steps: {job.profile_to}" in capsys.readouterr().err
    check_trace(json.loads((tmp_path / "trace.json").read_text()), *orders_of(job), [3, 4])


def run_by_another_clock(job: Job) -> None:
    """Each rank is a host of its own, with a clock of its own."""
    rank, real = int(os.environ["RANK"]), time.perf_counter
    profile.host_key = lambda: f"host {rank}"
    time.perf_counter = lambda: real() + 100.0 * rank
    run_rank(job)


@pytest.mark.thorough
@pytest.mark.slow
def test_four_ranks_with_clocks_of_their_own_are_traced_by_one(tmp_path):
    chunks = {"schedule": "interleaved_1f1b"}
    job = profiled(tmp_path, {"tp": 2, "pp": 2, "vpp": 2}, "2", pipeline=chunks)
    job = replace(job, log=str(tmp_path / "log.jsonl"))
    launch(run_by_another_clock, 4, job, timeout_seconds=HANG_SECONDS)
    trace = json.loads((tmp_path / "trace.json").read_text())
    orders, mesh = orders_of(job)
    check_trace(trace, orders, mesh, [2, 3])
    check_causes(trace, 2 * mesh.tp * 3 * 2 * 4)
    assert 0 < trace["otherData"]["clocks differ by at most (seconds)"] < 50
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for step in (2, 3):
        assert rows[step - 1]["bubble"] == pytest.approx(bubble_in(trace, mesh, step), abs=0.05)


def bubble_in(trace: dict[str, Any], mesh: Mesh, step: int) -> float:
    """By the spans of the trace: what ranks do not wait of the first stage's run."""
    worked, run = dict[int, float](), dict[int, float]()
    for (rank, track), events in tracks(trace).items():
        if track == MEASURED:
            of_step = [e for e in events if e["args"].get("step") == step and ("chunk" in e["args"] or _ends_a_run(e))]
            begun, ended = of_step[0]["ts"], of_step[-1]["ts"] + of_step[-1]["dur"]
            waits = [e["dur"] for e in events if e["cat"] == "wait" and begun <= e["ts"] < ended]
            run[rank], worked[rank] = ended - begun, ended - begun - sum(waits)
    first = [mesh.rank_of(**{**mesh.coordinate(rank), "pp": 0}) for rank in sorted(run)]
    return 1 - sum(worked[rank] / run[first[rank]] for rank in run) / len(run)


def _ends_a_run(event: dict[str, Any]) -> bool:
    return event["name"] == LAST_SENDS


@pytest.mark.parametrize(
    ("text", "made", "steps"),
    [
        ("3", 0, [2, 3, 4]),
        ("1", 10, [12]),
        ("10:13", 0, [10, 11, 12, 13]),
        ("1:1", 0, [1]),
        ("10:13", 11, [12, 13]),
        ("10:13", 13, []),
    ],
)
def test_a_number_of_steps_after_the_first_of_the_run_or_steps_by_their_numbers(text, made, steps):
    assert list(Window.parse(text, 20).steps(made)) == steps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a number or range of steps"),
        ("three", "is not a number or range of steps"),
        ("1:2:3", "is not a number or range of steps"),
        ("-3", "is not a number or range of steps"),
        ("²", "is not a number or range of steps"),
        ("9" * 30, "is not a number or range of steps"),
        ("0", "not a range of steps"),
        ("0:3", "not a range of steps"),
        ("4:3", "not a range of steps"),
        ("18:21", "ends at step 21, but the run has 20 steps"),
        ("20", "ends at step 21, but the run has 20 steps"),
    ],
)
def test_what_names_no_step_of_the_training_is_one_error(text, words):
    with pytest.raises(PlanError, match=words) as caught:
        Window.parse(text, 20)
    assert "10:13" in str(caught.value)
