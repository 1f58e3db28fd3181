"""All members of each communicator call the same in the same order, and no two wait for each other, as NCCL needs it.

The ranks talk over gloo, but over the communicators that they have on NCCL: links in place of the group of pp, and each
used once at the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from planner.pipeline.links import Link
from runtime import Engine
from runtime.distributed import opening
from runtime.distributed.default_group import World
from runtime.distributed.groups import Groups
from runtime.distributed.meeting import Rendezvous
from tests.tools.laboratory import Case, session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.order_recorder import Call, Record, Recorder, cycle, differences, elsewhere


@contextmanager
def as_on_nccl() -> Iterator[None]:
    """The groups of a run on NCCL: one for host memory of its own, links, a first use of each; but gloo carries all."""
    meet, open_world, new_group = Rendezvous.meet, opening.open_world, dist.new_group

    def open_two(device_type: str, backend: str, *rest: Any) -> World:
        world, host = open_world(device_type, "gloo", *rest), new_group(backend="gloo")
        return dataclasses.replace(world, host=host, made=[*world.made, host])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rendezvous, "meet", lambda *args: dataclasses.replace(meet(*args), backend="nccl"))
        patch.setattr(opening, "open_world", open_two)
        patch.setattr(opening, "options_of", lambda backend, name: None)
        patch.setattr(dist, "new_group", lambda *args, **options: new_group(*args, **{**options, "backend": "gloo"}))
        yield


def recorded(plan: Any, batches: list[dict[str, Tensor]]) -> Record:
    """Start, two steps (the gradients of the first are gathered), an evaluation, the parameters, the end."""
    with as_on_nccl(), Recorder() as recorder:
        with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
            names = names_of(engine.groups)
            engine.forward_backward(batches[0])
            engine.gather_gradients()
            engine.optimizer_step()
            engine.train_step(batches[1])
            engine.evaluate(batches[0])
            engine.gather_parameters()
        return Record(recorder.calls, names, recorder.members)


def recorded_with_local_batches(plan: Any, batches: list[dict[str, Tensor]]) -> tuple[Record, list[float]]:
    """Two steps on each dp rank's own share, and their losses."""
    with as_on_nccl(), Recorder() as recorder, Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        rank, size = engine.mesh.dp_rank, engine.mesh.dp_size
        shares = [{name: rows.chunk(size)[rank] for name, rows in batch.items()} for batch in batches[:2]]
        losses = [engine.train_step(share, local=True).loss for share in shares]
        return Record(recorder.calls, names_of(engine.groups), recorder.members), losses


def names_of(own: Groups) -> dict[str, str]:
    """What each group of this rank is for, by its name."""
    assert own.over("pp") is None
    kinds = {Link: "link", tuple: "embedding"}
    pairs = [("world", own.world), ("host", own.host)]
    pairs += [(kinds.get(type(name), name), group) for name, group in own.by_name.items()]
    return {group.group_name: name for name, group in pairs if group is not None}


SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
CASES = {
    "tp": (Case("llama", {"tp": 2}, job=recorded), {"world", "host", "tp"}),
    "sp": (Case("gpt2", {"tp": 2}, SEQUENCE_PARALLEL, job=recorded), {"world", "host", "tp"}),
    "dp": (Case("gpt2", {"dp": 2}, job=recorded), {"world", "host", "dp"}),
    "pp": (Case("llama", {"pp": 2}, job=recorded), {"world", "host", "link"}),
    "tied": (Case("gpt2", {"pp": 2}, job=recorded), {"world", "host", "link", "embedding"}),
    "gpipe": (
        Case("gpt2", {"pp": 2}, {"pipeline": {"schedule": "gpipe"}}, job=recorded),
        {"world", "host", "link", "embedding"},
    ),
    "interleaved": (Case("llama", {"pp": 2, "vpp": 2}, INTERLEAVED, job=recorded), {"world", "host", "link"}),
    "tp-pp-sp": (
        Case("gpt2", {"tp": 2, "pp": 2}, SEQUENCE_PARALLEL, job=recorded),
        {"world", "host", "tp", "link", "embedding"},
    ),
    "tp-dp": (Case("llama", {"tp": 2, "dp": 2}, job=recorded), {"world", "host", "tp", "dp"}),
    "pp-dp": (Case("gpt2", {"pp": 2, "dp": 2}, job=recorded), {"world", "host", "dp", "link", "embedding"}),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_members_call_the_same_and_none_waits_in_a_circle(name):
    case, used = CASES[name]
    records = session_lab().run(case)
    assert len(records) == case.world_size
    assert differences(records) == []
    assert cycle(records) == []
    assert elsewhere(records, "cpu") == []
    assert {record.names.get(call.group) for record in records for call in record.calls} == used
    assert any("reduction" in dict(c.details) for c in records[0].calls)
    assert_mutants_are_found(records)


@pytest.mark.thorough
@pytest.mark.slow
def test_counts_of_a_step_do_not_queue_behind_its_parameter_gathers():
    found = session_lab().run(Case("matmul", {"tp": 2, "dp": 2}, job=recorded_with_local_batches))
    records = [record for record, _ in found]
    assert differences(records) == []
    assert len({tuple(losses) for _, losses in found}) == 1
    for record in records:
        over_dp = [call for call in record.calls if record.names.get(call.group) == "dp"]
        first_gather = next(i for i, call in enumerate(over_dp) if call.op == "broadcast_")
        sums = [(i, call.details[0][0]) for i, call in enumerate(over_dp) if call.op == "allreduce_"]
        after_gathers = next(shape for i, shape in sums if i > first_gather)
        assert after_gathers == max(shape for _, shape in sums), "the first sum after the gathers is that of gradients"


@pytest.mark.slow
def test_gathers_of_weights_in_shards_share_no_group_with_the_sums_of_gradients():
    found = session_lab().run(Case("matmul", {"dp": 2}, {"optimizer": {"zero": 3}}, job=recorded_with_local_batches))
    records = [record for record, _ in found]
    assert differences(records) == []
    assert cycle(records) == []
    for record in records:
        ops: dict[str, set[str]] = {}
        for call in record.calls[len(record.names) :]:  # behind the first use of each
            ops.setdefault(record.names.get(call.group, ""), set()).add(call.op)
        assert "broadcast_" in ops["dp of weights"]
        assert "allreduce_" not in ops["dp of weights"]
        assert "allreduce_" in ops["dp"]
        assert "broadcast_" not in ops["dp"]


def assert_mutants_are_found(records: list[Record]) -> None:
    """Rank 1 swaps neighbouring collectives, of one communicator and of any two that rank 0 has too; and it gives a
    tensor of another device."""
    calls, shared = records[1].calls, set(records[0].members)
    everywhere = range(len(calls))
    alike = [at for at in everywhere if other_call(calls, at, lambda a, b: a.group == b.group)]
    assert alike
    assert all(differences(with_swap(records, at)) for at in alike)
    across = [at for at in everywhere if other_call(calls, at, lambda a, b: a.group != b.group)]
    across = [at for at in across if {c.group for c in calls[at : at + 2]} <= shared]
    assert across
    assert all(cycle(with_swap(records, at)) for at in across)
    for at in (0, len(calls) // 2):
        moved = [*calls[:at], calls[at]._replace(devices=frozenset({"cuda"})), *calls[at + 1 :]]
        assert len(elsewhere([records[0], records[1]._replace(calls=moved)], "cpu")) == 1


def other_call(calls: list[Call], at: int, which: Any) -> bool:
    """Whether the collectives ``at`` and after it are not alike, and as asked for."""
    both = calls[at : at + 2]
    return len(both) == 2 and all(c.peer is None for c in both) and both[0][:3] != both[1][:3] and which(*both)


def with_swap(records: list[Record], at: int) -> list[Record]:
    calls = records[1].calls
    calls = [*calls[:at], calls[at + 1], calls[at], *calls[at + 2 :]]
    return [records[0], records[1]._replace(calls=calls), *records[2:]]
