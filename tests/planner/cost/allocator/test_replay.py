"""The slack of a plan by replay: its events are those of the peaks, and what it replays is what the row counts."""

from __future__ import annotations

from typing import Any

import pytest

from planner import Plan
from planner.cluster.read import read_cluster
from planner.cost.allocator import replay
from planner.cost.allocator.caching import MIB
from planner.cost.allocator.replay import Replay, rows_of_plan
from planner.cost.let_go import let_go_of
from planner.cost.liveness import stage_events, stage_memory
from planner.cost.memory import SLACK, memory_rows, waiting_calls
from planner.recompute.decide import decide_recompute
from planner.saved.lowered import Lowered
from tests.models import hugging_face
from tests.tools.captures import plan_again

LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp and pp": {"mesh": {"tp": 2, "pp": 2}},
    "full": {"mesh": {"pp": 2}, "recompute": "full"},
    "selective": {"mesh": {"tp": 2}, "recompute": "selective"},
    "zero bubble": {"mesh": {"pp": 2}, "pipeline": {"schedule": "zero_bubble"}},
    "a v": {"mesh": {"pp": 2, "vpp": 2}, "pipeline": {"schedule": "zero_bubble_v"}},
}
CASES = [(f, layout) for f in ("llama", "t5", "mixtral") for layout in LAYOUTS if layout != "a v" or f == "t5"]


def planned(family: str, layout: str, cluster: str | None = "dgx-a100") -> Plan:
    batch = hugging_face.batch(family)
    inputs = {n: {"shape": list(v.shape[1:]), "dtype": str(v.dtype).removeprefix("torch.")} for n, v in batch.items()}
    spec = {"batch": {"global": 12, "micro": 2}, "inputs": inputs, "tensor_parallel": {"vocabulary_multiple": 8}}
    return plan_again(hugging_face.build(family), {**spec, "mesh": {}, **LAYOUTS[layout], "cluster": cluster})


def lowered_of(made: Plan) -> tuple[Lowered, Any]:
    lowered = Lowered(*made.to_run())
    return lowered, decide_recompute(made.spec.get("recompute", "none"), lowered)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_events_begin_and_end_as_the_bytes_that_are_counted(family: str, layout: str) -> None:
    made = planned(family, layout)
    lowered, recomputed = lowered_of(made)
    for index in range(lowered.num_stages):
        trace = lowered.trace(index)
        later = waiting_calls(trace) if made.schedule.has_weights else frozenset[int]()
        let_go = let_go_of(trace, recomputed)
        events, memory = stage_events(trace, let_go, later), stage_memory(trace, let_go=let_go, later=later)
        live: dict[Any, int] = {}
        for phase, most in ((events.forward, memory.forward), (events.backward, memory.backward)):
            peak = sum(live.values())
            for held, size, is_birth in phase:
                assert (held in live) != is_birth, held
                live.update({held: size}) if is_birth else live.pop(held)
                peak = max(peak, sum(live.values()))
            assert peak == most
            if phase is events.forward:  # what is sent and not saved is gone by the time of the backward
                for held in {*events.sent.values()} - events.kept:
                    live.pop(held, None)
                assert sum(live.values()) == memory.kept
        ends = {*events.received.values(), *events.returned, *events.aside}
        assert set(live) <= ends | events.kept


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_what_lives_in_a_replay_is_what_the_row_counts(family: str, layout: str) -> None:
    made = planned(family, layout)
    lowered, recomputed = lowered_of(made)
    traces = [lowered.trace(i) for i in range(lowered.num_stages)]
    waits = made.schedule.has_weights
    stages = [stage_events(t, let_go_of(t, recomputed), waiting_calls(t) if waits else frozenset()) for t in traces]
    for row in memory_rows(lowered, made.schedule, (), recomputed):
        rank = Replay(lowered, made.schedule, stages, row.pp_rank)
        slack = rank.slack(row)
        counted = row.total - row.slack
        assert counted - row.communication <= rank.most_live <= counted + row.communication
        assert slack == rank.allocator.most_reserved - rank.most_live >= 0
        assert rank.allocator.most_reserved % (2 * MIB) == 0


def test_slack_is_replayed_for_gpus_alone() -> None:
    on_gpu, on_cpu = planned("llama", "tp and pp"), planned("llama", "tp and pp", "cpu-local")
    for row, flat in zip(on_gpu.memory, on_cpu.memory, strict=True):
        comes_and_goes = flat.activations + flat.logits + flat.working + flat.communication
        assert flat.slack == pytest.approx(SLACK * comes_and_goes, abs=1)
        reserved = row.total - row.device
        assert reserved == pytest.approx(2 * MIB, abs=2 * row.communication)  # all of this model in one small segment


def test_sizes_that_follow_the_routing_keep_at_least_the_flat_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned("mixtral", "alone")
    lowered, recomputed = lowered_of(made)
    cluster = read_cluster("dgx-a100")
    monkeypatch.setattr(Replay, "slack", lambda self, row: 0)
    monkeypatch.setattr(replay, "OF_ROUTING", {call.node.target for call in lowered.trace(0).calls})
    (row,) = rows_of_plan(lowered, made.schedule, (), recomputed, (), cluster)
    (flat,) = memory_rows(lowered, made.schedule, (), recomputed)
    assert row.slack == flat.slack > 0


def test_a_replay_that_frees_nothing_reserves_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = planned("llama", "alone")
    lowered, _ = lowered_of(made)
    events = [stage_events(lowered.trace(0))]
    (row,) = memory_rows(lowered, made.schedule)
    usual = Replay(lowered, made.schedule, events, 0)
    usual.slack(row)
    monkeypatch.setattr(Replay, "_death", lambda self, place: None)
    leaking = Replay(lowered, made.schedule, events, 0)
    leaking.slack(row)
    assert leaking.allocator.most_reserved > usual.allocator.most_reserved
