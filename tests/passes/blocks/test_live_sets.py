"""Which values cross a cut: enough for every later stage and none too many; what is cheap is recomputed, not sent."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from passes.blocks.blocks import find_blocks
from passes.blocks.live_sets import (
    anchors,
    live_values,
    needed_nodes,
    recomputed_nodes,
    stages_of_copies,
)
from passes.program.ops.aten import is_random
from passes.program.program import Program
from passes.program.walks import ancestors
from passes.rules.flops import node_flops
from planner.capture.export import capture
from planner.mesh import Mesh
from planner.pipeline.stages import assign_stages
from tests.models.small import captured, layers


@st.composite
def staged_graphs(draw: st.DrawFn) -> tuple[dict[fx.Node, int], int]:
    """A random graph of up to 10 calls, each in a stage that is not before those of its operands."""
    graph, num_stages = fx.Graph(), draw(st.integers(1, 5))
    stage: dict[fx.Node, int] = {}
    for _ in range(draw(st.integers(1, 10))):
        operands = draw(st.lists(st.sampled_from(list(stage)), max_size=3, unique=True)) if stage else []
        node = graph.call_function(torch.stack, (operands,))
        node.meta["val"] = torch.empty(0)
        stage[node] = draw(st.integers(max((stage[n] for n in operands), default=0), num_stages - 1))
    return stage, num_stages


@given(staged_graphs())
def test_every_stage_can_be_computed_from_what_it_receives(given_graph):
    stage, num_stages = given_graph
    cuts = [set(), *map(set, live_values(stage, num_stages))]
    for node, own in stage.items():
        for operand in node.all_input_nodes:
            assert stage[operand] == own or operand.name in cuts[own]
    for k in range(1, num_stages):
        made_before = {n.name for n, s in stage.items() if s == k - 1}
        assert cuts[k] <= made_before | cuts[k - 1], "what is sent was made or received"


@given(staged_graphs())
def test_nothing_crosses_a_cut_that_no_later_stage_reads(given_graph):
    stage, num_stages = given_graph
    by_name, order = {n.name: n for n in stage}, [n.name for n in stage]
    for k, names in enumerate(live_values(stage, num_stages)):
        assert sorted(names, key=order.index) == list(names)
        assert all(any(stage[u] > k for u in by_name[name].users) for name in names)


class Model(nn.Module):
    """Reads its batch alone, its parameters alone, and both, cheaply and by products."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.a, self.b = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = (ids > 3).unsqueeze(-1)
        scaled = self.a * 2 + torch.arange(8)
        product = self.a @ self.b
        noisy = F.dropout(mask.double(), 0.5)
        x = self.norm(self.tokens(ids)) * mask * noisy
        return F.cross_entropy((x @ scaled + x @ product.relu()).flatten(0, 1) @ self.tokens.weight.T, labels.flatten())


@cache
def program_of(name: str) -> Program:
    if name == "layers":
        return captured(layers(4))
    ids = torch.zeros(2, 4, dtype=torch.long)
    return capture(Model().double(), {"ids": ids, "labels": ids})


PROGRAMS = ["model", "layers"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_recomputed_is_what_batch_or_weights_alone_give_without_draws_and_products_of_weights(name: str):
    program = program_of(name)
    for node in program.graph.graph.nodes:
        if node.op == "call_function":
            assert (node in recomputed_nodes(program)) == is_cheap(program, node), node.name


def is_cheap(program: Program, node: fx.Node) -> bool:
    """By the definition, looked up along all that the value is made of."""
    made_of = ancestors([node])
    calls = [n for n in made_of if n.op == "call_function"]
    weights = {n for n in made_of if n.name in program.parameters}
    batch = {n for n in made_of if n.name in program.inputs}
    products = any(node_flops(n) and ancestors([n]) & weights for n in calls)
    return not (weights and batch) and not products and not any(map(is_random, calls))


def test_masks_and_scaled_weights_are_recomputed_and_products_draws_and_activations_are_sent():
    targets = {str(n.target).split(".")[1] for n in recomputed_nodes(program_of("model"))}
    assert {"gt", "mul", "permute", "reshape"} <= targets
    assert not targets & {"embedding", "layer_norm", "dropout", "matmul", "relu", "cross_entropy_loss", "linear"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_call_runs_before_its_block_and_before_what_it_reads(name: str):
    program = program_of(name)
    block_of, recomputed = find_blocks(program).block_of(), recomputed_nodes(program)
    found = anchors(program, block_of, recomputed)
    calls = [n for n in program.graph.graph.nodes if n.op == "call_function"]
    assert set(found) == set(calls) - recomputed
    for node, anchor in found.items():
        assert anchor >= block_of.get(node.name, 0)
        assert all(anchor >= found[n] for n in node.all_input_nodes if n in found)


def test_an_embedding_runs_with_the_first_block_and_the_head_with_the_last():
    program = program_of("layers")
    found = anchors(program, find_blocks(program).block_of(), recomputed_nodes(program))
    by_name = {node.name: anchor for node, anchor in found.items()}
    assert (by_name["embedding"], by_name[program.loss]) == (0, 3)


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_copies_stand_where_something_reads_them_through_other_copies(pp: int):
    program = program_of("layers")
    assigned = assign_stages(program, find_blocks(program), Mesh(pp=pp))
    recomputed = recomputed_nodes(program)
    stage = {n: s for n in needed_nodes(program) - recomputed if (s := assigned.stage_of.get(n.name)) is not None}

    def reading(node: fx.Node) -> set[int]:
        return {s for u in node.users for s in ({stage[u]} if u in stage else reading(u))}

    copies = stages_of_copies(program, stage)
    assert {n: set(stages) for n, stages in copies.items()} == {n: reading(n) for n in copies}
    assert set(copies) == {n for n in program.graph.graph.nodes if n.op != "output"} - set(stage)
    assert all(list(stages) == sorted(set(stages)) for stages in copies.values())
