"""The slots of graphs as rows of the plan: how many, for which microbatch, and the bytes that they hold."""

from typing import Any

import pytest

from planner import Plan
from planner.lower import lower
from planner.regions.static_memory import slots_of
from planner.report.of_ranks import format_slots
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.specs import entry_inputs

INTERLEAVED = {"mesh": {"pp": 2, "vpp": 2}, "pipeline": {"schedule": "interleaved_1f1b"}}
LAYOUTS: list[dict[str, Any]] = [{"mesh": {}}, {"mesh": {"tp": 2, "pp": 2}}, INTERLEAVED]


def planned(name: str, scope: list[str], *, impl: str = "emulate", microbatches: int = 4, **sections: Any) -> Plan:
    entry = families.build(name)
    inputs = entry_inputs(entry)
    spec = {"mesh": {}, "batch": {"global": microbatches, "micro": 1}, "inputs": inputs, **sections}
    return plan_again(entry.model, {**spec, "cuda_graphs": {"impl": impl, "scope": scope}})


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_bytes_are_those_of_the_regions_for_each_slot_and_all_stand_in_the_memory_table(name, layout):
    made = planned(name, ["attn", "mlp"], **layout)
    assert len(made.graph_slots) == made.mesh.pp * made.mesh.vpp
    for row in made.graph_slots:
        assert row.chunk is not None
        here = [r for r in made.regions if r.stage == made.mesh.stages_of(row.pp_rank)[row.chunk] and not r.refused]
        assert row.num_regions == len(here)
        assert row.bytes == row.num_slots * sum(region.static_bytes for region in here)
        assert row.input_bytes == row.num_slots * sum(v.bytes for r in here for v in r.inputs.values())
        assert row.output_bytes == row.num_slots * sum(v.bytes for r in here for v in r.outputs.values())
        assert (row.num_graphs, row.num_replays) == (2 * len(here) * row.num_slots, 2 * len(here) * 4)
    for memory in made.memory:
        total = sum(row.bytes for row in made.graph_slots if row.pp_rank == memory.pp_rank)
        assert memory.graph_buffers == total > 0


@pytest.mark.thorough
def test_the_slot_of_each_microbatch_is_the_one_that_the_run_takes():
    made = planned("llama", ["attn"], microbatches=16, **INTERLEAVED)
    for row in made.graph_slots:
        slots = slots_of(made.schedule.orders[row.pp_rank])
        assert row.slots == tuple(slots[row.chunk, m] for m in range(16))  # pyright: ignore[reportArgumentType]
        assert len(set(row.slots)) == row.num_slots


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [LAYOUTS[0], {"mesh": {"pp": 2}}, INTERLEAVED])
def test_only_replays_grow_with_the_microbatches(layout):
    rows = [planned("gpt2", ["attn"], microbatches=n, **layout).graph_slots for n in (16, 64, 256)]
    for few, *more in zip(*rows, strict=True):
        for times, row in zip((4, 16), more, strict=True):
            assert row.num_replays == times * few.num_replays
            assert (row.num_graphs, row.num_slots, row.bytes) == (few.num_graphs, few.num_slots, few.bytes)


@pytest.mark.thorough
def test_transformer_engine_captures_for_each_microbatch_and_shares_inputs_by_signature():
    layers, counts = 4, []
    for microbatches in (16, 64):
        by_slot = planned("gpt2", ["attn"], microbatches=microbatches, **INTERLEAVED)
        made = planned("gpt2", ["attn"], impl="transformer_engine", microbatches=microbatches, **INTERLEAVED)
        counts.append([row.num_graphs for row in made.graph_slots])
        one = made.regions[0].static_bytes // 4  # an input, an output, the gradients of both
        for rank, in_flight in enumerate((5, 3)):  # warm-up + 1
            inputs = [sum(row.input_bytes for row in p.graph_slots if row.pp_rank == rank) for p in (by_slot, made)]
            num_slots = sum(row.num_slots for row in made.graph_slots if row.pp_rank == rank)
            assert inputs == [num_slots * one * layers // 4, in_flight * one * layers // 4]
            assert inputs[1] < inputs[0]
    assert counts == [[2 * 1 * n] * 4 for n in (16, 64)]
    alone = planned("gpt2", ["attn"], impl="transformer_engine", microbatches=16)
    assert [row.num_graphs for row in alone.graph_slots] == [2 * layers]


@pytest.mark.thorough
def test_a_region_whose_outputs_carry_no_gradient_has_no_backward():
    entry = families.build("gpt2")
    for name, parameter in entry.model.named_parameters():
        parameter.requires_grad_("h.3" in name or "ln_f" in name)
    inputs = {key: {"shape": list(shape), "dtype": "int64"} for key, (shape, _, _) in entry.inputs.items()}
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 1}, "inputs": inputs}
    made = plan_again(entry.model, {**spec, "cuda_graphs": {"impl": "emulate"}})
    assert [region.num_graphs for region in made.regions] == [1, 1, 1, 2]
    assert [(row.num_graphs, row.num_replays) for row in made.graph_slots] == [(5, 20)]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [LAYOUTS[0], INTERLEAVED, {"mesh": {"pp": 4}}])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_whole_iteration_is_one_graph_over_all_that_the_rank_reads_of_the_batch(name, layout):
    made = planned(name, ["full_iteration"], **layout)
    assert made.regions == ()
    for row in made.graph_slots:
        stages = lower(made, row.pp_rank * made.mesh.tp).stages
        read = {key for stage in stages for key in stage.inputs}
        counts = {number for stage in stages for number in stage.denominators}
        entry = families.build(name)
        sizes = {key: value.nbytes for key, value in entry.batch(4, 0).items()}
        assert row.input_bytes == sum(sizes[key] for key in read) + 8 * len(counts)
        assert (row.chunk, row.num_graphs, row.num_replays) == (None, 1, 1)
        assert made.memory[row.pp_rank].graph_buffers == row.bytes


def test_slots_that_come_in_turn_are_printed_once():
    assert format_slots([0, 1, 2] * 50) == "(0 1 2).."
    assert format_slots([0] * 8) == "(0).."
    assert format_slots([0, 1, 2, 3]) == "0 1 2 3"
    assert format_slots([*range(30), 0]) == " ".join(map(str, range(24))) + " …"
    assert format_slots([]) == ""
