"""Static buffers of messages: none is written while somebody may read it, and few serve any number of microbatches."""

from collections.abc import Iterator

import networkx as nx
import pytest

from planner.fold import stage_of
from planner.pipeline.links import Message, received_by, sent_by
from planner.pipeline.message_slots import Slots, message_slots, ring_of, ring_sizes
from planner.pipeline.schedule import Schedule, build_schedule

SCHEDULES = [
    ("gpipe", 3, 4, 1),
    ("1f1b", 2, 6, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved_1f1b", 2, 6, 2),
    ("interleaved_1f1b", 3, 6, 3),
    ("zero_bubble", 3, 7, 1),
    ("zero_bubble_v", 2, 5, 2),
    ("zero_bubble_v", 3, 7, 2),
]


def happens_before(schedule: Schedule, one_way: tuple[int, ...] = ()) -> nx.DiGraph:
    """(pp rank, position) → all that comes behind it: the order of each rank, and messages between them."""
    graph, at = nx.DiGraph(), places(schedule)
    for rank, order in enumerate(schedule.orders):
        nx.add_path(graph, [(rank, position) for position in range(len(order))])
    for (kind, microbatch, stage), place in at.items():
        receiver = stage + (1 if kind == "F" else -1)
        is_sent = kind == "F" or (kind == "B" and receiver not in one_way)
        if is_sent and (kind, microbatch, receiver) in at:
            graph.add_edge(place, at[kind, microbatch, receiver])
    return nx.transitive_closure_dag(graph)


def places(schedule: Schedule) -> dict[tuple[str, int, int], tuple[int, int]]:
    """(kind, microbatch, stage) → (pp rank, position)."""
    return {
        (action.kind, action.microbatch, stage_of(rank, action.chunk, schedule.pp, schedule.fold)): (rank, position)
        for rank, order in enumerate(schedule.orders)
        for position, action in enumerate(order)
    }


def messages(schedule: Schedule, rank: int, slots: Slots) -> Iterator[tuple[bool, Message, int]]:
    """Of one rank: whether it is received, the message, and the position at which its buffer is written."""
    for position, action in enumerate(schedule.orders[rank]):
        stage = stage_of(rank, action.chunk, schedule.pp, schedule.fold)
        for is_received, found_by in ((True, received_by), (False, sent_by)):
            message = found_by(action.kind, stage, action.microbatch)
            if action.kind != "W" and (is_received, message) in slots:
                yield is_received, message, position - is_received  # a receive is posted one action ahead


@pytest.mark.parametrize("one_way", [(), (0,)], ids=["gradients", "frozen"])
@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_no_buffer_is_overwritten_while_a_message_in_it_may_be_read(case, one_way):
    schedule = build_schedule(*case)
    behind, at = happens_before(schedule, one_way), places(schedule)
    for rank in range(schedule.pp):
        slots = message_slots(schedule.orders, rank, schedule.num_stages, schedule.fold, one_way)
        before: dict[object, Message] = {}
        for is_received, message, begins in messages(schedule, rank, slots):
            slot = ring_of(is_received, message), slots[is_received, message]
            if slot in before:
                last = before[slot]
                keys = [(kind, last.microbatch, last.receiver) for kind in ("FBW" if is_received else last.kind)]
                assert all(behind.has_edge(at[key], (rank, begins)) for key in keys if key in at)
            before[slot] = message


@pytest.mark.parametrize(
    ("kind", "pp", "vpp"), [("1f1b", 2, 1), ("1f1b", 4, 1), ("interleaved_1f1b", 2, 2), ("zero_bubble", 4, 1)]
)
def test_the_number_of_buffers_does_not_follow_the_microbatches(kind, pp, vpp):
    sizes = []
    for num_microbatches in (16, 64):
        schedule = build_schedule(kind, pp, num_microbatches, vpp)
        slots = [message_slots(schedule.orders, rank, schedule.num_stages, schedule.fold) for rank in range(pp)]
        assert all(sum(is_received for is_received, _ in of_rank) >= num_microbatches for of_rank in slots)
        sizes.append([ring_sizes(of_rank) for of_rank in slots])
    assert sizes[0] == sizes[1]
    assert max(size for of_rank in sizes[0] for size in of_rank.values()) <= 2 * pp * vpp + 1


def test_every_message_of_a_rank_has_a_buffer():
    schedule = build_schedule("zero_bubble_v", 2, 5, 2)
    slots = message_slots(schedule.orders, 0, schedule.num_stages, schedule.fold)
    assert len(slots) == 5 * 4  # stages 0 and 3: a value and a gradient each way; the turn is on the other rank
    schedule = build_schedule("1f1b", 1, 4, 1)
    assert message_slots(schedule.orders, 0, 1, schedule.fold) == {}
