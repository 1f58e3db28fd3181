"""Slots: a buffer serves one microbatch at a time, and how many there are does not follow the microbatches."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.pipeline.kinds import Sizes
from planner.pipeline.message_slots import order_by_microbatch, slots_by_kind
from planner.pipeline.schedule import Action, Order, build_schedule, rank_order
from planner.pipeline.simulate import simulate
from planner.regions.static_memory import slots_of
from planner.report.schedule import schedule_text, schedule_to_dict
from tests.tools.examples import examples
from tests.tools.paths import ORACLES
from tests.tools.schedules import graph_slots, input_slots, schedules

pytestmark = pytest.mark.check

CASES = json.loads((ORACLES / "schedules.json").read_text())["cases"]
Signature = tuple[tuple[tuple[int, ...], str], ...]
HIDDEN: Signature = (((2, 16, 64), "float32"),)
SHORTER: Signature = (((2, 8, 64), "float32"),)
WITH_MASK: Signature = (*HIDDEN, ((2, 16), "bool"))
SIGNATURES = [HIDDEN, SHORTER, WITH_MASK]


@st.composite
def ranks(draw: st.DrawFn) -> tuple[Order, list[list[Signature]]]:
    """One rank's order, and the signature of each layer of each chunk."""
    schedule = draw(schedules())
    order = schedule.orders[draw(st.integers(0, schedule.pp - 1))]
    layers = st.lists(st.sampled_from(SIGNATURES), max_size=4)
    return order, [draw(layers) for _ in range(schedule.vpp)]


def num_graphs_by_slot(order: Order, num_layers: list[int]) -> int:
    """A forward and a backward for each slot of each layer."""
    return 2 * len(set(graph_slots(order, num_layers).values()))


def in_flight(order: Order, chunk: int) -> int:
    held = peak = 0
    for action in order:
        held += (action.chunk == chunk) * (1 if action.kind == "F" else -1)
        peak = max(peak, held)
    return peak


def check_no_slot_is_taken_while_it_is_held(order: Order, kinds: list, slots: dict) -> None:
    held: dict[int, tuple] = {}
    kind_of: dict[int, object] = {}
    for action in order:
        for layer, kind in enumerate(kinds[action.chunk]):
            key = action.microbatch, action.chunk, layer
            slot = slots[key]
            if action.kind == "F":
                assert slot not in held, f"{action} takes what {held.get(slot)} holds"
                assert kind_of.setdefault(slot, kind) == kind, "a slot never changes its kind"
                held[slot] = key
            else:
                assert held.pop(slot) == key
    assert not held


@given(ranks())
@examples(150)
def test_a_buffer_is_never_taken_while_it_is_held(rank):
    order, signatures = rank
    check_no_slot_is_taken_while_it_is_held(order, signatures, slots_by_kind(order, signatures))
    own = [[(c, i) for i in range(len(chunk))] for c, chunk in enumerate(signatures)]
    check_no_slot_is_taken_while_it_is_held(order, own, graph_slots(order, [len(chunk) for chunk in signatures]))


@given(ranks())
@examples(150)
def test_there_are_as_many_buffers_of_a_signature_as_are_held_at_once(rank):
    order, signatures = rank
    slots = slots_by_kind(order, signatures)
    for signature in SIGNATURES:
        held = peak = 0
        for action in order:
            held += signatures[action.chunk].count(signature) * (1 if action.kind == "F" else -1)
            peak = max(peak, held)
        assert len({slot for (_, c, i), slot in slots.items() if signatures[c][i] == signature}) == peak


@given(ranks())
@examples(150)
def test_a_layer_has_as_many_pairs_of_graphs_as_its_chunk_has_microbatches_in_flight(rank):
    order, signatures = rank
    num_layers = [len(chunk) for chunk in signatures]
    slots = graph_slots(order, num_layers)
    for chunk, n in enumerate(num_layers):
        for layer in range(n):
            pairs = {slot for (_, c, i), slot in slots.items() if (c, i) == (chunk, layer)}
            assert len(pairs) == in_flight(order, chunk)


def test_a_buffer_that_comes_back_one_step_early_is_seen():
    """A mutant for the properties above: F3 runs before B0, but is given what B0 gives back."""
    order = rank_order("1f1b", Sizes(4, 8, 1, 4), 0)
    assert (str(order[3]), str(order[4])) == ("F3.0", "B0.0")
    early = input_slots((*order[:3], order[4], order[3], *order[5:]))
    with pytest.raises(AssertionError, match=r"F3\.0 takes what \(0, 0, 0\) holds"):
        check_no_slot_is_taken_while_it_is_held(order, [[None]], early)


@pytest.mark.parametrize("num_microbatches", [16, 64, 256])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 4), (8, 2)])
def test_layers_of_one_signature_need_layers_times_warmup_plus_one_buffers(pp, vpp, num_microbatches):
    schedule = build_schedule(None, pp, num_microbatches, vpp)
    for rank, order in enumerate(schedule.orders):
        in_all = min(schedule.num_warmup(rank) + 1, num_microbatches * vpp)
        assert len(set(input_slots(order, [3] * vpp).values())) == 3 * in_all


@pytest.mark.parametrize(("pp", "num_layers"), [(1, 12), (2, 6), (4, 3)])
def test_graphs_by_slot_are_two_a_layer_for_each_microbatch_in_flight(pp, num_layers):
    for num_microbatches in (16, 64, 256):
        schedule = build_schedule("1f1b", pp, num_microbatches)
        for rank, order in enumerate(schedule.orders):
            assert num_graphs_by_slot(order, [num_layers]) == 2 * num_layers * (schedule.num_warmup(rank) + 1)
            overlap = schedule.num_warmup(rank) > 0  # on the last rank, and without a pipeline, none do
            by_microbatch = 2 * num_layers * (num_microbatches if overlap else 1)
            assert num_layers * len(order_by_microbatch(order)) == by_microbatch


def test_graphs_of_an_interleaved_schedule_are_those_of_its_chunks():
    """A layer's graph serves no other layer: 8 + 4 pairs, where 11 microbatches are in flight at once."""
    for num_microbatches in (16, 64, 256):
        order = build_schedule(None, 4, num_microbatches, 2).orders[0]
        assert [in_flight(order, chunk) for chunk in (0, 1)] == [8, 4]
        assert num_graphs_by_slot(order, [3, 3]) == 2 * 3 * (8 + 4)
        assert len(set(input_slots(order, [3, 3]).values())) == 3 * 11


def test_without_a_pipeline_each_layer_has_one_slot():
    order = build_schedule("1f1b", 1, 8).orders[0]
    assert set(graph_slots(order, [3]).values()) == {0, 1, 2}
    assert set(input_slots(order, [3]).values()) == {0, 1, 2}


def test_the_buffer_that_has_been_free_longest_is_taken_first():
    order = tuple(Action(kind, m) for kind, m in [("F", 0), ("F", 1), ("B", 1), ("B", 0), ("F", 2), ("B", 2)])
    assert input_slots(order) == {(0, 0, 0): 0, (1, 0, 0): 1, (2, 0, 0): 1}


def test_layers_of_several_signatures_share_no_buffer():
    order = build_schedule("1f1b", 2, 8).orders[0]
    slots = slots_by_kind(order, [[HIDDEN, WITH_MASK, HIDDEN]])
    assert {slots[m, 0, 1] for m in range(8)} == {1, 4}
    assert {slots[m, 0, i] for m in range(8) for i in (0, 2)} == {0, 2, 3, 5}


@pytest.mark.parametrize(
    "case", [c for c in CASES if set(c.get("num_layers_per_chunk", ())) == {1}], ids=lambda c: str(c["id"])
)
def test_json_of_a_schedule_counts_the_static_inputs_of_one_layer_a_chunk(case):
    kind, group = "interleaved_1f1b" if case["vpp"] else "1f1b", case["microbatch_group_size_per_vp_stage"]
    schedule = build_schedule(kind, case["pp"], case["num_microbatches"], case["vpp"] or 1, group)
    rank = schedule_to_dict(schedule, simulate(schedule))["ranks"][case["pp_rank"]]
    assert rank["static_input_slots"] == case["num_unique_static_input_buffers"]


@pytest.mark.parametrize(
    ("pp", "vpp", "slots", "graphs"), [(4, 2, (11, 9, 7, 5), (12, 12, 10, 6)), (4, 1, *[(4, 3, 2, 1)] * 2)]
)
def test_a_printed_schedule_has_the_slots_of_either_kind_of_graphs(pp, vpp, slots, graphs):
    """Those of graphs are what a plan with `cuda_graphs: {impl: local}` holds."""
    schedule = build_schedule(None, pp, 8, vpp)
    simulation = simulate(schedule)
    ranks = schedule_to_dict(schedule, simulation)["ranks"]
    assert tuple(rank["static_input_slots"] for rank in ranks) == slots
    assert tuple(rank["graph_slots"] for rank in ranks) == graphs
    assert graphs == tuple(len(set(slots_of(order).values())) for order in schedule.orders)
    text = schedule_text(schedule, simulation)
    for counts in (slots, graphs):
        assert f" {' '.join(map(str, counts))}   (by pp rank; " in text
