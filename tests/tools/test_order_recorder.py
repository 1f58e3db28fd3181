"""The recorder's findings, on records made by hand and on a group of one rank."""

import pytest
import torch
import torch.distributed as dist

from tests.tools.order_recorder import Call, Record, Recorder, cycle, differences, elsewhere

CPU = frozenset({"cpu"})


def record(*calls: Call, names: dict[str, str] | None = None) -> Record:
    return Record(list(calls), names or {}, dict.fromkeys((call.group for call in calls), (0, 1)))


def summed(group: str, op: str = "SUM") -> Call:
    return Call(group, "allreduce_", (((2,), "torch.float32"), ("reduction", op)), CPU)


def message(op: str, peer: int, tag: int = 0) -> Call:
    return Call("link", op, (((2,), "torch.float32"), ("tag", tag)), CPU, peer)


def wait(at: int, peer: int) -> Call:
    return Call("link", "wait", (at,), frozenset(), peer)


@pytest.mark.parametrize("other", [summed("a", "MAX"), summed("b"), None], ids=["reduction", "group", "absent"])
def test_a_collective_that_a_member_does_not_call_is_a_difference(other):
    records = [record(summed("a"), summed("a")), record(summed("a"), *([other] if other else []))]
    assert any(text.startswith("group a: ranks 0 and 1 differ at 1") for text in differences(records))
    assert differences([records[0], records[0]]) == []


def test_messages_are_held_against_each_other_in_their_order():
    sends = [message("send", 1, tag) for tag in (0, 1)]
    receives = [message("recv", 0, tag) for tag in (0, 1)]
    assert differences([record(*sends), record(*receives)]) == []
    assert differences([record(*sends), record(*receives[::-1])]) == [
        "group link: messages from 0 to 1 differ at 0: [(((2,), 'torch.float32'), ('tag', 0))] and "
        "[(((2,), 'torch.float32'), ('tag', 1))]"
    ]


def test_collectives_of_two_groups_in_opposite_orders_are_a_circle():
    assert cycle([record(summed("a"), summed("b")), record(summed("a"), summed("b"))]) == []
    assert cycle([record(summed("a"), summed("b")), record(summed("b"), summed("a"))])


def test_two_that_wait_for_their_sends_before_they_receive_are_a_circle():
    def held(peer: int) -> Record:
        return record(message("send", peer), wait(0, peer), message("recv", peer), wait(2, peer))

    def free(peer: int) -> Record:
        return record(message("send", peer), message("recv", peer), wait(1, peer), wait(0, peer))

    assert len(cycle([held(1), held(0)])) == 4
    assert cycle([held(1), free(0)]) == cycle([free(1), free(0)]) == []


def test_a_tensor_of_the_host_belongs_to_the_host_group_alone():
    names = {"a": "host", "b": "tp"}
    records = [record(summed("a"), summed("b"), names=names)]
    assert elsewhere(records, "cpu") == []
    assert elsewhere(records, "cuda") == ["rank 0: allreduce_ over tp with a tensor on ['cpu']"]


def test_calls_are_recorded_whatever_they_are_called_by():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Recorder() as recorder:
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
            dist.all_reduce(torch.ones(3))
            dist.all_gather_object([None], "text")
            dist.broadcast(torch.ones(2, dtype=torch.int64), 0)
            dist.barrier()
        before = len(recorder.calls)
        dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
    assert [call.op for call in recorder.calls] == [
        *("allreduce_", "allreduce_", "allgather_", "allgather_", "broadcast_", "barrier")
    ]
    assert [dict(call.details).get("reduction") for call in recorder.calls[:2]] == ["MAX", "SUM"]
    assert recorder.calls[4].details == (((2,), "torch.int64"), ("root_rank", 0))
    assert len(recorder.calls) == before
