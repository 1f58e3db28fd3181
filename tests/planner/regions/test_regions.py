"""Attention and the rest of a block, found by what computes scores; what crosses their borders."""

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from passes.pieces import Region
from planner import Plan, PlanError, plan
from planner.pipeline.schedule import build_schedule
from planner.regions.static_memory import slots_of
from runtime import Engine
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import differences, train_on
from tests.tools.specs import entry_inputs

aten = torch.ops.aten
MODELS = ["gpt2", "llama", "bert", "t5", "falcon-new", "gptj", "relative-bias", "matmul", "parallel", "torch-encoder"]
MODELS += ["einsum", "t5-gated"]


def planned(name: str, *scope: str, mesh: dict[str, int] | None = None) -> Plan:
    entry = families.build(name)
    inputs = entry_inputs(entry)
    spec = {"mesh": mesh or {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs}
    return plan_again(entry.model, {**spec, "cuda_graphs": {"impl": "emulate", "scope": list(scope)}})


def calls(made: Plan, region: Region) -> list[fx.Node]:
    return [made.to_run()[0].program.node(name) for name in region.nodes]


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_attention_holds_the_scores_and_the_rest_does_not(name):
    made = planned(name, "attn", "mlp")
    parts = {"attn": 0, "mlp": 0}
    for region in made.regions:
        softmaxes = [n for n in calls(made, region) if "softmax" in str(n.target) or "dot_product" in str(n.target)]
        assert bool(softmaxes) == (region.scope == "attn"), region
        parts[region.scope] += 1
    assert min(parts.values()) >= 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_a_block_are_the_block(name):
    parts, whole = planned(name, "attn", "mlp"), planned(name)
    for layer in whole.regions:
        mine = [region.nodes for region in parts.regions if region.block == layer.block]
        assert frozenset().union(*mine) == layer.nodes
        assert sum(map(len, mine)) == len(layer.nodes)


@pytest.mark.thorough
@pytest.mark.sampled(1)
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


@pytest.mark.thorough
@pytest.mark.parametrize("scope", [("attn", "mlp"), ()])
def test_a_bias_that_blocks_share_is_made_outside_with_all_that_it_is_made_of(scope):
    made = planned("t5", *scope)
    assert all(row.captured for row in made.graph_regions)
    held = [n for region in made.regions for n in calls(made, region)]
    program = made.to_run()[0].program
    tables = [name for name, fqn in program.parameters.items() if "relative_attention_bias" in fqn]
    readers = {user for name in tables for user in program.node(name).users}
    assert len(readers) == 2  # one of the encoder, one of the decoder
    assert readers.isdisjoint(held)


@pytest.mark.thorough
def test_a_model_without_attention_is_refused_where_attention_is_asked_for():
    with pytest.raises(PlanError, match="no block of the model has a part attn") as error:
        planned("state-space", "attn")
    assert "cuda_graphs.scope" in str(error.value.where)


def test_experts_are_refused_on_a_dense_model():
    with pytest.raises(PlanError, match="part moe"):
        planned("gpt2", "moe")


@pytest.mark.thorough
def test_a_function_with_its_own_backward_is_not_captured_and_says_so():
    made = planned("own-round", "attn", "mlp")
    rows = [row for row in made.graph_regions if not row.captured]
    assert rows
    assert all("autograd.Function" in row.reason for row in rows)
    assert all("own_functions.py" in row.reason for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize("scope", ["mlp", "full_iteration"])
def test_a_model_of_which_nothing_can_be_captured_is_refused_by_op_and_line(scope):
    with pytest.raises(PlanError, match=r"no CUDA graph can .*Rounded\(_, 8\) is a custom autograd.Function") as error:
        planned("own-round", scope)
    assert "layers.0.parts.mlp   (own_functions.py:" in str(error.value)
    assert "impl: none" in error.value.fix


def test_a_scope_that_a_model_lacks_is_refused_also_beside_one_that_it_has():
    with pytest.raises(PlanError, match="no block of the model has a part moe that"):
        planned("gpt2", "attn", "moe")


class Looked(nn.Module):
    """A block that looks rows up and writes some."""

    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.write = write
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("places", torch.arange(12).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.write(x[:, self.places]))))


class Looking(nn.Module):
    def __init__(self, write: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.layers = nn.Sequential(*(Looked(write) for _ in range(3)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(ids)).square().mean()


def looking(write: Callable[[torch.Tensor], torch.Tensor]) -> Plan:
    inputs = {"ids": {"shape": [12], "dtype": "int64", "high": 32}}
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs}
    return plan(Looking(write), {**spec, "cuda_graphs": {"impl": "emulate"}})


def test_rows_that_are_looked_up_by_number_have_a_fixed_shape_and_are_captured():
    made = looking(lambda x: torch.index_put(x, (x > 0,), x.new_zeros(())))  # one number: no mask is counted
    assert [row.captured for row in made.graph_regions] == [True] * 3


def test_writing_where_a_mask_is_set_makes_the_host_wait_and_is_refused():
    with pytest.raises(PlanError, match=r"the model's 3 regions: .* aten.index_put.default .* the host would wait"):
        looking(lambda x: torch.index_put(x, (x > 0,), x.new_zeros(()), accumulate=True))


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
            counts.append((microbatches, {(chunk, slot) for (chunk, _), slot in slots.items()}))
    by_count = [[slots for count, slots in counts if count == n] for n in (16, 64, 256)]
    assert kind == "gpipe" or by_count[0] == by_count[1] == by_count[2]


class SplitOverParts(nn.Module):
    """A block of which one split gives attention its operands and the rest its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.out, self.down = nn.Linear(16, 64), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *heads, gate = self.given(x).split(16, -1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in heads)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(gate))


class SplitModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(SplitOverParts(), SplitOverParts())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scope", [["attn"], ["mlp"]], ids=str)
def test_of_a_list_that_two_parts_read_the_items_cross_the_border(scope):
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": {"x": {"shape": [8, 16], "dtype": "float64"}}}
    runs = []
    for sections in ({}, {"cuda_graphs": {"impl": "emulate", "scope": scope}}):
        torch.manual_seed(0)
        with Engine(plan(SplitModel().double(), {**spec, **sections})) as engine:
            runs.append(train_on(engine, [{"x": torch.randn(4, 8, 16, dtype=torch.float64)} for _ in range(2)]))
            rows = engine.plan.graph_regions
    assert all(row.captured and len(row.outputs) == 1 + (scope == ["attn"]) for row in rows)
    assert differences(*runs) == []
