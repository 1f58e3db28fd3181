"""Every communicator is used once before the first step, in an order that no mesh gets stuck in; and the links."""

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from planner.mesh import Mesh
from planner.pipeline.links import Link, links
from runtime import Engine
from runtime.distributed import opening
from runtime.distributed.default_group import World
from runtime.distributed.groups import Groups
from runtime.distributed.meeting import Rendezvous
from runtime.distributed.opening import LINK_CTAS, _fill, communicators, make, open_groups, options_of, use_in_turn
from tests.tools.laboratory import Case, session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.nccl_rules import NcclRules, Outcome, run_ranks
from tests.tools.order_recorder import Call, Record, Recorder, cycle, differences, elsewhere
from tests.tools.ranks import Ranks

MESHES = {
    "tp2": (Mesh(tp=2), []),
    "dp3": (Mesh(dp=3), []),
    "pp2-vpp2": (Mesh(pp=2, vpp=2), [(0, 3)]),
    "pp2-vpp2 in a v": (Mesh(pp=2, vpp=2, fold="v"), [(0, 3)]),
    "pp3-vpp2-dp2 in a v": (Mesh(pp=3, vpp=2, dp=2, fold="v"), [(0, 5), (1, 5)]),
    "pp4": (Mesh(pp=4), [(0, 3), (1, 2, 3)]),
    "pp3-vpp2-dp2": (Mesh(pp=3, vpp=2, dp=2), [(0, 5), (1, 4)]),
    "tp2-pp2-dp2": (Mesh(tp=2, pp=2, dp=2), [(0, 1)]),
    "tp2-cp2-pp2": (Mesh(tp=2, cp=2, pp=2), []),
    "cp2-dp2-pp2": (Mesh(cp=2, dp=2, pp=2), [(0, 1)]),
    "tp4-pp4-dp2": (Mesh(tp=4, pp=4, dp=2), [(0, 3)]),
    "tp2-pp2-dp2-ep2": (Mesh(tp=2, pp=2, dp=2, ep=2), [(0, 1)]),
    "tp2-pp2-dp2-ep2-etp1": (Mesh(tp=2, pp=2, dp=2, ep=2, etp=1), [(0, 1)]),
    "dp4-etp2-ep2": (Mesh(dp=4, etp=2, ep=2), []),
    "tp2-pp2-dp3-pp first": (Mesh(tp=2, pp=2, dp=3, order="pp-tp-cp-ep-dp"), [(0, 1)]),
}


def groups_of(rank: int, mesh: Mesh, tied: list[tuple[int, ...]], rules: NcclRules) -> Groups:
    """As ``open_groups`` makes them where the device speaks NCCL: links, and no group of pp."""
    groups = Groups(mesh, rank, torch.device("cpu"), timedelta(seconds=HANG_SECONDS), backend="nccl")
    groups.world = rules.new_group(range(mesh.world_size))  # pyright: ignore[reportAttributeAccessIssue]
    make(groups, communicators(mesh, tied)[1:])
    return groups


def opened(mesh: Mesh, tied: list[tuple[int, ...]], last_first_on: Collection[int] = ()) -> tuple[Outcome, list]:
    """``last_first_on``: the ranks that use them in the opposite order."""
    made: list = []

    def work(rank: int, rules: NcclRules) -> str:
        ordered = communicators(mesh, tied)
        use_in_turn(groups_of(rank, mesh, tied, rules), ordered[:: -1 if rank in last_first_on else 1])
        made[:] = rules.made
        return "ended"

    return run_ranks(mesh.world_size, work), made


@pytest.mark.parametrize("name", MESHES)
def test_no_mesh_gets_stuck_and_every_communicator_is_built(name):
    outcome, made = opened(*MESHES[name])
    assert (outcome.stuck, outcome.error) == ({}, None)
    assert outcome.results == ["ended"] * MESHES[name][0].world_size
    assert all(group.used == set(group.members) for group in made)
    assert all(sum(group.calls.values()) or group.posted for group in made)


def test_the_last_first_on_every_second_rank_is_stuck():
    mesh, tied = MESHES["pp4"]
    outcome, _ = opened(mesh, tied, last_first_on=(0, 2))
    assert outcome.error is None
    assert outcome.stuck
    assert all("the first use of" in what for what in outcome.stuck.values())


def test_the_list_has_every_group_of_the_mesh_with_the_sender_of_a_link_first():
    mesh = Mesh(tp=2, pp=2, dp=2)
    found = communicators(mesh, [(0, 1)])
    names = [name for name, _ in found]
    assert names == ["world", *["tp"] * 4, *["dp"] * 4, *[(0, 1)] * 4, *[(0, 1, "F")] * 4, *[(1, 0, "B")] * 4]
    assert [members for name, members in found if name == (0, 1, "F")] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [members for name, members in found if name == (1, 0, "B")] == [(4, 0), (5, 1), (6, 2), (7, 3)]


def test_a_link_has_few_blocks_on_nccl_and_no_options_elsewhere(monkeypatch):
    def options() -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(min_ctas=None, max_ctas=None))

    link = Link(0, 1, "F")
    assert options_of("gloo", link) is None
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
    first, second = options_of("nccl", link), options_of("nccl", link)
    assert (first.config.min_ctas, first.config.max_ctas) == (1, LINK_CTAS)
    assert first is not second


def test_every_link_is_made_with_its_options():
    mesh, tied = MESHES["pp3-vpp2-dp2"]
    _, made = opened(mesh, tied)
    limited = [group.members for group in made if group.options is not None]
    assert len(limited) == len(links(3, 2)) * 2
    assert {group.options.config.max_ctas for group in made if group.options} == {LINK_CTAS}


def test_awaited_axes_have_a_high_priority_stream_and_gradients_the_default(monkeypatch):
    mesh = Mesh(tp=2, cp=2, dp=2, ep=4, etp=2, pp=1)
    groups = Groups(mesh, 0, torch.device("cpu"), timedelta(seconds=HANG_SECONDS), backend="nccl")
    options = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, *, pg_options=None, **_: (ranks, pg_options))
    monkeypatch.setattr("runtime.distributed.opening.use_in_turn", lambda groups, ordered: None)
    _fill(groups, [], ["tp-dp", "etp-edp", "dp-cp of weights"])
    assert groups.over("dp-cp of weights")[0] == [0, 2, 4, 6]
    assert groups.over("dp-cp of weights")[1].is_high_priority_stream
    assert groups.over("tp-dp") == ([0, 1, 4, 5], None)  # updates of matrices: no kernel waits for them
    assert groups.over("etp-edp") == ([0, 1], None)
    high = {
        axis: made[1] is not None and made[1].is_high_priority_stream
        for axis in ("tp", "cp", "dp", "dp-cp", "ep")
        if (made := groups.over(axis)) is not None
    }
    assert high == {"tp": True, "cp": True, "dp": False, "dp-cp": False, "ep": True}


def use_on_gloo(sizes: dict, tied: list[tuple[int, ...]]) -> tuple[str, int, int]:
    """Links and first use on real groups; then a message over each link."""
    groups = open_groups(Mesh(**sizes), {}, tied, timeout_seconds=HANG_SECONDS)
    made, ordered = len(groups.made), communicators(groups.mesh, tied)
    make(groups, (each for each in ordered if isinstance(each.name, Link)))
    use_in_turn(groups, ordered)
    over_links = {name: group for name, group in groups.by_name.items() if isinstance(name, Link)}
    arrived = 0
    for (sender, receiver, _), group in over_links.items():
        box = torch.tensor([float(groups.rank)])
        ranks = [groups.mesh.rank_of(**{**groups.coordinate, "pp": pp}) for pp in (sender, receiver)]
        if groups.rank == ranks[0]:
            dist.send(box, ranks[1], group=group)
        else:
            dist.recv(box, ranks[0], group=group)
            arrived += box.item() == ranks[0]
    backend = dist.get_backend_config(next(iter(over_links.values())))
    assert len(groups.made) == made + len(over_links)
    groups.close()
    return backend, len(over_links), arrived


@pytest.mark.thorough
@pytest.mark.slow
def test_first_use_and_links_on_gloo():
    found = Ranks(4, "processes").run(use_on_gloo, {"pp": 2, "vpp": 2, "dp": 2}, [(0, 3)])
    assert [(backend, arrived) for backend, _, arrived in found] == [("cpu:gloo,cuda:gloo", 2)] * 4


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
