import pytest
import torch
from torch import Tensor, nn

from passes.blocks.blocks import Blocks, find_blocks
from passes.program.program import Program
from planner.capture.export import capture
from tests.models.small import WIDTH, Body, Layer, Model, captured, hugging_face, in_order, layers, tokens


def kinds(blocks: Blocks) -> list[int]:
    return [block.kind for block in blocks.instances]


def paths(blocks: Blocks) -> list[str]:
    return [block.path for block in blocks.instances]


def ops(program: Program, names: tuple[str, ...]) -> list[str]:
    return [str(program.node(name).target) for name in names]


@pytest.mark.parametrize(
    ("family", "stem"), [("gpt2", "transformer.h."), ("llama", "model.layers."), ("bert", "bert.encoder.layer.")]
)
def test_the_layers_of_a_family_are_one_kind(family: str, stem: str) -> None:
    blocks = find_blocks(hugging_face(family))
    assert paths(blocks) == [f"{stem}{i}" for i in range(3)]
    assert kinds(blocks) == [0, 0, 0]


def test_encoder_and_decoder_lists_are_both_found() -> None:
    blocks = find_blocks(hugging_face("t5"))
    assert paths(blocks) == [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(3)]
    assert kinds(blocks) == [0, 1, 1, 2, 3, 3], "the first layer of each side also makes the position bias"


@pytest.mark.thorough
def test_a_list_in_which_every_layer_differs_is_still_a_list() -> None:
    assert paths(find_blocks(hugging_face("t5", 2))) == [
        "encoder.block.0",
        "encoder.block.1",
        "decoder.block.0",
        "decoder.block.1",
    ]


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_nodes_of_one_kind_correspond_one_to_one(family: str) -> None:
    program = hugging_face(family)
    blocks = find_blocks(program)
    first = {block.kind: block for block in reversed(blocks.instances)}
    for block in blocks.instances:
        model = first[block.kind]
        assert [blocks.representative[name] for name in block.nodes] == list(model.nodes)
        assert ops(program, block.nodes) == ops(program, model.nodes)
    assert set(blocks.representative) == {node.name for node in program.graph.graph.nodes}


def test_a_private_parameter_maps_to_that_of_the_first_block() -> None:
    program = hugging_face("gpt2")
    blocks = find_blocks(program)
    fqn = program.parameters
    mapped = {fqn[name]: fqn[blocks.representative[name]] for name in fqn}
    assert mapped["transformer.h.2.mlp.c_fc.weight"] == "transformer.h.0.mlp.c_fc.weight"
    assert mapped["transformer.h.1.ln_1.bias"] == "transformer.h.0.ln_1.bias"
    assert mapped["transformer.ln_f.weight"] == "transformer.ln_f.weight"


def test_what_is_outside_of_blocks_maps_to_itself() -> None:
    program = hugging_face("llama")
    blocks = find_blocks(program)
    outside = {node.name for node in program.graph.graph.nodes} - set(blocks.block_of()) - set(program.parameters)
    assert {blocks.representative[name] for name in outside} == outside


def test_alternating_kinds_are_two_kinds() -> None:
    program = captured(lambda: Body(in_order, layers=nn.ModuleList(Layer(2 if i % 2 else 4) for i in range(5))))
    assert kinds(find_blocks(program)) == [0, 1, 0, 1, 0]


@pytest.mark.thorough
def test_a_first_layer_of_its_own_kind_is_a_block_of_the_list() -> None:
    program = captured(lambda: Body(in_order, layers=nn.ModuleList(Layer(4 if i else 2) for i in range(4))))
    assert kinds(find_blocks(program)) == [0, 1, 1, 1]


def test_a_module_dict_is_a_list_in_the_order_of_its_calls() -> None:
    program = captured(lambda: Body(in_order, layers=nn.ModuleDict({name: Layer() for name in "zay"})))
    assert paths(find_blocks(program)) == ["body.layers.z", "body.layers.a", "body.layers.y"]


@pytest.mark.thorough
def test_plain_attributes_are_siblings() -> None:
    program = captured(lambda: Body(in_order, first=Layer(), odd=Layer(2), last=Layer()))
    blocks = find_blocks(program)
    assert paths(blocks) == ["body.first", "body.odd", "body.last"]
    assert kinds(blocks) == [0, 1, 0]


def test_a_layer_applied_twice_is_two_blocks_that_share_their_parameters() -> None:
    program = captured(lambda: Body(lambda s, x: s.layer(s.layer(x)), layer=Layer()))
    blocks = find_blocks(program)
    assert paths(blocks) == ["body.layer", "body.layer"]
    assert kinds(blocks) == [0, 0]
    assert all(blocks.representative[name] == name for name in program.parameters)


@pytest.mark.thorough
def test_layers_shared_in_pairs_map_to_the_first_pair() -> None:
    def build() -> nn.Module:
        a, b = Layer(), Layer()
        return Body(in_order, layers=nn.ModuleList([a, a, b, b]))

    program = captured(build)
    blocks = find_blocks(program)
    assert kinds(blocks) == [0, 0, 0, 0]
    names = {fqn: name for name, fqn in program.parameters.items()}
    assert blocks.representative[names["body.layers.2.up.weight"]] == names["body.layers.0.up.weight"]


@pytest.mark.thorough
def test_stages_of_layers_are_containers_and_their_layers_are_the_blocks() -> None:
    def stage(num_layers: int) -> nn.Module:
        return Body(in_order, layers=nn.ModuleList(Layer() for _ in range(num_layers)))

    equal = find_blocks(captured(lambda: Body(in_order, stages=nn.ModuleList(stage(2) for _ in range(3)))))
    assert (len(equal.instances), equal.num_kinds) == (6, 1)
    mixed = find_blocks(captured(lambda: Body(in_order, stages=nn.ModuleList([Layer(), stage(3), Layer()]))))
    assert paths(mixed) == ["body.stages.0", *(f"body.stages.1.layers.{i}" for i in range(3)), "body.stages.2"]
    assert mixed.num_kinds == 1


@pytest.mark.thorough
def test_parts_of_a_layer_are_no_blocks_even_when_they_repeat() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()
            self.mix = nn.Linear(WIDTH, 4 * WIDTH)
            self.unmix = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.unmix(self.mix(self.a(x))))

    program = captured(lambda: Body(in_order, layers=nn.ModuleList(Twice() for _ in range(3))))
    assert paths(find_blocks(program)) == [f"body.layers.{i}" for i in range(3)]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


@pytest.mark.thorough
def test_experts_side_by_side_are_no_blocks() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Mlp() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + sum(expert(x) for expert in self.experts)

    program = captured(lambda: Body(in_order, layers=nn.ModuleList(Experts() for _ in range(2))))
    assert paths(find_blocks(program)) == ["body.layers.0", "body.layers.1"]


@pytest.mark.thorough
def test_two_towers_give_the_layers_of_both() -> None:
    def tower() -> nn.Module:
        return Body(in_order, layers=nn.ModuleList(Layer() for _ in range(2)))

    blocks = find_blocks(captured(lambda: Body(lambda s, x: s.left(x) + s.right(x), left=tower(), right=tower())))
    assert paths(blocks) == [f"body.{side}.layers.{i}" for side in ("left", "right") for i in range(2)]
    assert blocks.num_kinds == 1


def test_layers_of_a_single_linear_are_blocks_where_there_is_nothing_larger() -> None:
    program = captured(lambda: Body(in_order, layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))))
    assert paths(find_blocks(program)) == [f"body.layers.{i}" for i in range(3)]


@pytest.mark.thorough
def test_floating_point_constants_do_not_make_kinds() -> None:
    program = captured(lambda: Body(in_order, layers=nn.ModuleList(Layer(scale=0.5**i) for i in range(3))))
    assert find_blocks(program).num_kinds == 1


@pytest.mark.thorough
def test_a_frozen_layer_is_a_kind_of_its_own() -> None:
    with torch.device("meta"):
        model = Model(layers(4)())
    model.body.layers[1].requires_grad_(False)
    blocks = find_blocks(capture(model, {"input_ids": tokens(), "labels": tokens()}))
    assert kinds(blocks) == [0, 1, 0, 0]


@pytest.mark.thorough
def test_a_weight_tied_into_one_layer_keeps_its_own_representative() -> None:
    class Tied(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.tied.sum()

    with torch.device("meta"):
        model = Model(Body(in_order, layers=nn.ModuleList([Layer(), Tied(), Layer()])))
    model.body.layers[1].tied = model.tokens.weight
    program = capture(model, {"input_ids": tokens(), "labels": tokens()})
    blocks = find_blocks(program)
    assert kinds(blocks) == [0, 1, 0]
    tied = next(name for name, fqn in program.parameters.items() if fqn == "tokens.weight")
    assert blocks.representative[tied] == tied


def test_a_model_without_layers_has_no_blocks() -> None:
    assert find_blocks(captured(nn.Identity)).instances == ()
