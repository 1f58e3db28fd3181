"""The cuts under discussion: rules carry them until no rule names a new one, forward and backward, over blocks too."""

from functools import cache

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from passes.blocks.blocks import find_blocks
from passes.partition.typings.table import Site, options_of
from passes.program.program import Program
from passes.types.types import I, R, V
from planner.capture.export import capture
from planner.placement.candidates import MAX_CUTS, Candidates, Cutting
from planner.placement.decide import _edges
from tests.models.small import Body, Layer, captured, in_order, layers

MODELS = {
    "three layers": layers(3),
    "two widths": lambda: Body(in_order, layers=nn.ModuleList(Layer(2 if i % 2 else 4) for i in range(4))),
    "one linear": lambda: Body(in_order, layer=nn.Linear(32, 32)),
}


@cache
def program_of(model: str) -> Program:
    return captured(MODELS[model])


def candidates_of(program: Program, tp: int = 2, seeds=None, **keys) -> Candidates:
    """One node of each kind of block, as when a plan is made."""
    nodes = [n for n in program.graph.graph.nodes if n.op != "output"]
    blocks = find_blocks(program)
    rep = {n.name: blocks.representative.get(n.name) or n.name for n in nodes}
    _, producers, readers = _edges(program, nodes, rep, {})
    return Candidates([n for n in nodes if rep[n.name] == n.name], Cutting(tp, **keys), producers, readers, seeds)


class Mlp(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x + self.shift).relu()).square().mean()


def mlp() -> Program:
    return capture(Mlp(), {"x": torch.empty(2, 4)})


def test_cuts_of_an_mlp():
    found = candidates_of(mlp())
    lines = [f"{n.name}: {', '.join(map(str, sorted(found.cuts[n.name])))}" for n in found.nodes]
    assert_expected_inline(
        "\n".join(lines) + "\n",
        """\
p_up_weight: V(0:16), V(1:4)
p_up_bias: V(0:16)
p_down_weight: V(0:4), V(1:16)
p_down_bias: V(0:4)
b_shift: V(0:4)
x: V(1:4)
add: V(1:4)
linear: V(1:16)
linear_1: V(1:16)
relu: V(1:16)
linear_2: V(1:4)
linear_3: V(1:4)
square: V(1:4)
mean: 
""",
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_asking_every_rule_again_names_nothing_new(model: str, tp: int):
    found = candidates_of(program_of(model), tp)
    for node in found.nodes:
        if node.op == "call_function":
            again = options_of(Site(node, tp, found.cuts))
            assert again == found.options[node.name], node.name
            made = {o.out for o in again if o.out.is_sharded}
            assert made <= found.cuts[node.name] or len(found.cuts[node.name]) == MAX_CUTS
            for position in range(len(node.all_input_nodes)):
                wanted = {o.args[position] for o in again if o.args[position].is_sharded}
                for value in found.making(node, position):
                    cuts = found.cuts[value.name]
                    assert wanted <= cuts or len(cuts) == MAX_CUTS, f"{node.name} reads {value.name}"


@pytest.mark.parametrize("model", MODELS)
def test_every_cut_divides_its_dim_and_there_are_few(model: str):
    found = candidates_of(program_of(model), 4)
    for node in found.nodes:
        assert len(found.cuts[node.name]) <= MAX_CUTS
        for cut in found.cuts[node.name]:
            value = node.meta["val"] if isinstance(node.meta["val"], Tensor) else node.meta["val"][0]
            assert sum(cut.sizes) == value.shape[cut.dim]
            assert all((s.size + cut.padding) % 4 == 0 for s in cut.segments if s.sharded)


@pytest.mark.parametrize("model", MODELS)
def test_who_reads_a_value_is_who_it_is_made_for(model: str):
    found = candidates_of(program_of(model))
    made_for = {
        (value.name, node.name, position)
        for node in found.nodes
        for position in range(len(node.all_input_nodes))
        for value in found.making(node, position)
    }
    read_by = {(n.name, reader.name, position) for n in found.nodes for reader, position in found.reading(n)}
    assert read_by == made_for


def test_the_input_of_a_block_is_made_by_what_comes_before_any_of_its_copies():
    program = program_of("three layers")
    found = candidates_of(program)
    representatives = {n.name for n in found.nodes}
    norm = next(n for n in found.nodes if "layer_norm" in str(n.target))
    makers = found.making(norm, 0)
    assert [n.name for n in makers if "embedding" in str(n.target)] == ["embedding"]
    assert len(makers) == 2
    assert {n.name for n in makers} <= representatives
    cuts = [found.cuts[n.name] for n in makers]
    assert found.cuts[norm.all_input_nodes[0].name] >= cuts[0] | cuts[1]


def test_a_parameter_may_be_held_in_every_type_and_nothing_else_is_cut():
    found = candidates_of(mlp())
    outs = {name: [o.out for o in found.options[name]] for name in ("p_up_weight", "b_shift", "x")}
    assert outs == {"p_up_weight": [I, R, V(0, 16), V(1, 4)], "b_shift": [I], "x": [I]}


def test_a_frozen_parameter_has_no_partial_gradients():
    model = Mlp()
    model.up.weight.requires_grad_(False)
    found = candidates_of(capture(model, {"x": torch.empty(2, 4)}))
    assert R not in [o.out for o in found.options["p_up_weight"]]


def test_on_one_rank_nothing_is_cut():
    found = candidates_of(mlp(), 1)
    assert not any(found.cuts.values())
    assert {len(found.options[n.name]) for n in found.nodes if n.op == "placeholder"} == {1}


def test_a_seed_is_discussed_and_carried_on():
    program = mlp()
    rows = V(0, 2)
    plain = candidates_of(program)
    assert rows not in plain.cuts["relu"]
    seeded = candidates_of(program, seeds={"relu": rows})
    assert rows in seeded.cuts["relu"]
    assert rows in seeded.cuts["linear"], "backward"
    assert any(o.args[0] == rows for o in seeded.options["linear_1"]), "forward"


@pytest.mark.parametrize(("size", "multiple", "padding"), [(97, 128, 159), (97, 16, 31), (97, 1, 1), (96, 128, 0)])
def test_a_vocabulary_that_does_not_divide_is_padded_to_the_multiple_for_each_rank(size, multiple, padding):
    program = captured(MODELS["one linear"], size)
    found = candidates_of(program, vocabulary_multiple=multiple)
    assert [c for c in found.cuts["p_tokens_weight"] if c.dim == 0] == [V(0, size, padding=padding)]
