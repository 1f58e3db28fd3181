from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.blocks.blocks import find_blocks
from passes.errors import PlanError
from passes.program.program import Program
from planner.capture.export import capture
from planner.mesh import Mesh
from planner.pipeline.stages import assign_stages
from tests.models.small import WIDTH, Body, Layer, captured, hugging_face, in_order, layers, tokens
from tests.tools.stages_in_turn import check_equals_whole, sizes, stage_of_parameter, stages_of


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "pp"), [("gpt2", 3), ("llama", 2), ("bert", 3), ("t5", 4), ("t5", 6)])
def test_stages_in_turn_compute_the_loss_of_the_whole_graph(family: str, pp: int) -> None:
    program = hugging_face.__wrapped__(family)  # its own copy, as it is changed
    no_dropout(program)
    check_equals_whole(program, stages_of(program, pp))


@pytest.mark.sampled(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["E|{}|L", "E||{}|L", "E{}|L", "E|{}L", "E{}||L"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_stages_without_blocks_in_turn_compute_the_loss_of_the_whole_graph(family: str, layout: str) -> None:
    program = hugging_face.__wrapped__(family)
    no_dropout(program)
    num_blocks = len(find_blocks(program).instances)
    text = layout.format(f"t*{num_blocks}")
    stages = stages_of(program, 1 + text.count("|"), split=text)
    check_equals_whole(program, stages)
    assert sizes(stages) == [num_blocks if "t" in stage else 0 for stage in text.split("|")]
    for cost, stage in zip(stages.cost_of_stage, text.split("|"), strict=True):
        assert cost if stage else not cost, "an empty stage computes nothing, and no other one is empty"
    assert sum(stages.cost_of_stage) == sum(stages_of(program, 1).cost_of_stage)


def test_the_embedding_and_the_head_are_where_a_layout_says() -> None:
    program = hugging_face("gpt2")
    stages = stages_of(program, 4, split="E|t*2|t|L")
    assert sizes(stages) == [0, 2, 1, 0]
    assert stage_of_parameter(program, stages, "transformer.wpe.weight") == (0,)
    assert stage_of_parameter(program, stages, "transformer.wte.weight") == (0, 3)
    assert stage_of_parameter(program, stages, "transformer.ln_f.weight") == (3,)
    assert stage_of_parameter(program, stages, "transformer.h.2.ln_1.weight") == (2,)
    assert [len(cut) for cut in stages.live] == [1, 1, 1]


class NoEnds(nn.Module):
    """Layers on what it is given; the mean of the last one is part of that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "at"), [("E|t*4L", 1), ("E||t*4L", 1)])
def test_a_stage_of_its_own_for_an_embedding_that_is_not_there_is_refused_at_its_letter(layout: str, at: int) -> None:
    with torch.device("meta"):
        model = NoEnds()
    program = capture(model, {"x": torch.zeros(2, 16, WIDTH, device="meta")})
    with pytest.raises(PlanError) as error:
        stages_of(program, 1 + layout.count("|"), split=layout)
    what, text, pointer = error.value.what.split("\n")
    assert what.endswith(f"the model computes nothing before its first block, at character {at}")
    assert text[pointer.index("^")] == "E"
    assert error.value.fix
    check_equals_whole(program, stages_of(program, 2, split="Ett|ttL"))
    check_equals_whole(program, stages_of(program, 2, split="Et*4|L"))


class LossInside(NoEnds):
    """Each layer gives a loss beside its output, and that of the last one is the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithLoss() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        loss = x.mean()
        for layer in self.layers:
            x, loss = layer(x)
        return loss


class WithLoss(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y = super().forward(x)
        return y, y.square().mean()


@pytest.mark.thorough
def test_a_stage_of_its_own_for_a_loss_inside_the_last_block_is_refused_at_its_letter() -> None:
    with torch.device("meta"):
        model = LossInside()
    program = capture(model, {"x": torch.zeros(2, 16, WIDTH, device="meta")})
    with pytest.raises(PlanError, match="the model computes nothing after its last block, at character 6"):
        stages_of(program, 2, split="Et*4|L")
    check_equals_whole(program, stages_of(program, 2, split="Ett|ttL"))


def test_a_model_of_one_piece_has_no_layout_of_two_stages() -> None:
    program = captured(lambda: nn.Linear(WIDTH, WIDTH))
    assert not find_blocks(program).instances
    for split in ("E|L", [1, 1]):
        with pytest.raises(PlanError, match="only 0 blocks"):
            stages_of(program, 2, split=split)
    check_equals_whole(program, stages_of(program, 1, split="EL"))


def test_a_layout_with_the_ends_beside_blocks_is_the_list_of_its_sizes() -> None:
    program = hugging_face("gpt2")
    assert stages_of(program, 2, split="Ett|tL") == stages_of(program, 2, split=[2, 1])
    assert stages_of(program, 3, split="E(t|)*2tL") == stages_of(program, 3, split=[1, 1, 1])


def no_dropout(program: Program) -> None:
    """Set every dropout rate to 0 in place: order of drawing must not matter to these comparisons."""
    for node in program.graph.graph.nodes:
        if node.target is torch.ops.aten.dropout.default:
            node.args = (node.args[0], 0.0, True)
        elif node.target is torch.ops.aten.scaled_dot_product_attention.default and len(node.args) > 4:
            node.args = (*node.args[:4], 0.0, *node.args[5:])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "build",
    [
        layers(5),
        lambda: Body(in_order, layers=nn.ModuleList(Layer(2 if i % 2 else 4) for i in range(5))),
        lambda: Body(in_order, layers=nn.ModuleDict({name: Layer() for name in "zay"})),
        lambda: Body(lambda s, x: s.layer(s.layer(x)), layer=Layer()),
    ],
)
@pytest.mark.parametrize("split", ["even", "auto"])
def test_our_own_models_in_stages_compute_the_loss_of_the_whole(build: Callable[[], nn.Module], split: str) -> None:
    program = captured(build)
    num_blocks = len(find_blocks(program).instances)
    stages = stages_of(program, 2, split=[num_blocks // 2, num_blocks - num_blocks // 2] if split == "even" else split)
    check_equals_whole(program, stages)


@pytest.mark.thorough
def test_the_head_is_not_free() -> None:
    """The model of the benchmarks: 4 layers of width 256, vocabulary 8192, sequence 128."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(8192, 256), nn.Embedding(128, 256)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(256, 8, 1024, 0.0, "gelu", batch_first=True) for _ in range(4)
            )
            self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 8192, bias=False)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            x = self.tokens(input_ids) + self.positions(torch.arange(128, device=input_ids.device))
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    with torch.device("meta"):
        model = Large()
    for micro in (1, 4):
        ids = tokens(128, micro)
        assert sizes(stages_of(capture(model, {"input_ids": ids, "labels": ids}), 2)) == [3, 1]


def test_a_depth_that_pp_does_not_divide_is_balanced() -> None:
    stages = stages_of(captured(layers(7), vocabulary=8), 4)
    assert sorted(sizes(stages)) == [1, 2, 2, 2]
    assert sum(sizes(stages)) == 7


def test_a_given_split_is_honoured() -> None:
    stages = stages_of(hugging_face("gpt2"), 2, split=[1, 2])
    assert stages.blocks_of_stage == ((0,), (1, 2))


def test_chunks_of_an_interleaved_pipeline_are_stages_in_model_order() -> None:
    stages = stages_of(captured(layers(4)), 2, 2)
    assert stages.num_stages == 4
    assert stages.blocks_of_stage == ((0,), (1,), (2,), (3,))


@pytest.mark.parametrize(
    ("split", "what"),
    [([3], "1 entries"), ([4, -1], "without blocks"), ([1, 1], "adds up to 2"), ([3, 0], "without blocks")],
)
def test_a_split_that_does_not_fit_is_refused(split: list[int], what: str) -> None:
    with pytest.raises(PlanError, match=what) as error:
        stages_of(hugging_face("gpt2"), 2, split=split)
    assert "add up to 3" in error.value.fix


def test_more_stages_than_blocks_is_refused_with_the_largest_number_that_fits() -> None:
    program = hugging_face("gpt2")
    with pytest.raises(PlanError, match="pp 4 stages, but the model has only 3 blocks") as error:
        stages_of(program, 4)
    assert error.value.fix == "choose pp · vpp ≤ 3"
    assert error.value.where == "mesh.pp"


def test_a_model_without_blocks_is_one_stage() -> None:
    program = captured(nn.Identity)
    assert stages_of(program, 1).live == ()
    with pytest.raises(PlanError, match="only 0 blocks"):
        stages_of(program, 2)


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    program = hugging_face("gpt2")
    assert stage_of_parameter(program, stages_of(program, 3), "transformer.wte.weight") == (0, 2)


def test_costs_of_stages_add_up_whatever_the_split() -> None:
    program = hugging_face("t5")
    totals = {sum(stages_of(program, pp).cost_of_stage) for pp in (1, 2, 3, 6)}
    assert len(totals) == 1


def test_one_stage_has_all_blocks_of_a_length_and_several_refuse_other_numbers_of_them() -> None:
    """Blocks may repeat at one length alone, as where experts have slots for a part of its tokens."""
    program = hugging_face("gpt2")
    blocks = find_blocks(program)
    count = len(blocks.instances)
    assert sizes(assign_stages(program, blocks, Mesh(), sizes=(count - 1,))) == [count]
    assert sizes(assign_stages(program, blocks, Mesh(pp=2), sizes=(1, count - 1))) == [1, count - 1]
    with pytest.raises(PlanError, match=f"{count} blocks repeat at this length, and {count + 1} at the longest one"):
        assign_stages(program, blocks, Mesh(pp=2), sizes=(1, count))
