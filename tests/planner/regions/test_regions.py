"""Attention and the rest of a block, found by what computes scores; what crosses their borders."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from planner import Plan, PlanError, plan
from planner.pipeline.schedule import build_schedule
from planner.regions.regions import Region
from planner.regions.static_memory import num_slots, slots_of
from tests.models import families

aten = torch.ops.aten
MODELS = ["gpt2", "llama", "bert", "t5", "falcon-new", "gptj", "relative-bias", "matmul", "parallel", "torch-encoder"]


def planned(name: str, *scope: str, mesh: dict[str, int] | None = None) -> Plan:
    entry = families.build(name)
    inputs = {
        key: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        for key, (shape, dtype, _) in entry.inputs.items()
    }
    spec = {"mesh": mesh or {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs}
    return plan(entry.model, {**spec, "cuda_graphs": {"impl": "emulate", "scope": list(scope)}})


def calls(made: Plan, region: Region) -> list[fx.Node]:
    return [made.to_run()[0].program.node(name) for name in region.nodes]


@pytest.mark.parametrize("name", MODELS)
def test_attention_holds_the_scores_and_the_rest_does_not(name):
    made = planned(name, "attn", "mlp")
    parts = {"attn": 0, "mlp": 0}
    for region in made.regions:
        softmaxes = [n for n in calls(made, region) if "softmax" in str(n.target) or "dot_product" in str(n.target)]
        assert bool(softmaxes) == (region.scope == "attn"), region
        parts[region.scope] += 1
    assert min(parts.values()) >= 2


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_a_block_are_the_block(name):
    parts, whole = planned(name, "attn", "mlp"), planned(name)
    for layer in whole.regions:
        mine = [region.nodes for region in parts.regions if region.block == layer.block]
        assert frozenset().union(*mine) == layer.nodes
        assert sum(map(len, mine)) == len(layer.nodes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scope", [("attn",), ("mlp",), ("attn", "mlp"), ()])
def test_nothing_comes_back_into_a_captured_region(name, scope):
    made = planned(name, *scope)
    for region in made.regions:
        inside = set(calls(made, region))
        made_of = {n for n in inside for n in n.users if n not in inside}
        seen = set(made_of)
        while made_of:
            made_of = {user for n in made_of for user in n.users} - seen
            seen |= made_of
        assert region.refused or not seen & inside


def test_a_model_without_attention_is_refused_where_attention_is_asked_for():
    with pytest.raises(PlanError, match="no block of the model has a part attn") as error:
        planned("state-space", "attn")
    assert "cuda_graphs.scope" in str(error.value.where)


def test_experts_are_refused_on_a_dense_model():
    with pytest.raises(PlanError, match="part moe"):
        planned("gpt2", "moe")


def test_a_function_with_its_own_backward_is_not_captured_and_says_so():
    made = planned("own-round", "mlp")
    rows = [row for row in made.graph_regions if not row.captured]
    assert rows
    assert all("autograd.Function" in row.reason for row in rows)
    assert all("own_functions.py" in row.reason for row in rows)


def test_the_plan_lists_regions_and_their_memory():
    made = planned("llama", "attn", mesh={"pp": 2})
    first = made.graph_regions[0]
    assert (first.block, first.scope, first.captured) == ("model.layers.0", "attn", True)
    per_slot = first.bytes
    assert [row.graph_buffers for row in made.memory] == [2 * 2 * per_slot, 2 * 1 * per_slot]  # layers · slots
    assert "Graph regions" in made.describe()


@pytest.mark.parametrize(("kind", "pp", "vpp"), [("gpipe", 2, 1), ("1f1b", 4, 1), ("interleaved_1f1b", 4, 2)])
def test_a_slot_is_one_microbatch_s_from_its_forward_to_its_backward(kind, pp, vpp):
    counts = []
    for microbatches in (16, 64, 256):
        for order in build_schedule(kind, pp, microbatches, vpp).orders:
            slots, held = slots_of(order), dict[tuple[int, int], int]()
            for action in order:
                slot = slots[action.chunk, action.microbatch]
                if action.kind == "F":
                    assert (action.chunk, slot) not in held
                    held[action.chunk, slot] = action.microbatch
                else:
                    assert held.pop((action.chunk, slot)) == action.microbatch
            counts.append((microbatches, num_slots(slots)))
    by_count = [[slots for count, slots in counts if count == n] for n in (16, 64, 256)]
    assert kind == "gpipe" or by_count[0] == by_count[1] == by_count[2]
