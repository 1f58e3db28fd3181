"""Sequences that no input has, cut over cp: patches of images and videos, frames of sound."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from passes.moe.find import find_experts
from passes.partition.sequence.cut import cut_sequence
from passes.partition.sequence.flow import longest_sequence
from passes.program.ops.aten import aten, shape_of
from passes.program.program import Program
from tests.models.families import Entry, build
from tests.models.patches import IMAGES, MODELS, WIDTH, Classifier, joint, of_convolution
from tests.numeric.test_half_precision import check as close_in_half
from tests.passes.partition.sequence.test_equal import program_of
from tests.tools.sequence_ranks import compared

BEGINS = "cp shards a sequence from aten.linear on; every rank of cp computes what leads to it in full"


def captured(entry: Entry) -> tuple[Program, Any, dict[str, Tensor]]:
    batch = entry.batch(2, 5)
    return *program_of(entry.model, batch, 2), batch


def cut(program: Program, cp: int = 2) -> Program:
    cut_sequence(program, cp, find_experts(program))
    return program


def rows(program: Program) -> list[int]:
    """Of each product of a weight with tokens [b, n, d] how many tokens a rank computes, of all sequences."""
    products = program.graph.graph.find_nodes(op="call_function", target=aten.linear.default)
    return [shape_of(n)[0] * shape_of(n)[1] for n in products if len(shape_of(n)) == 3]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_one_process(name: str, cp: int) -> None:
    entry = build(name)
    program, terms, batch = captured(entry)
    assert max(compared(program, terms, entry.model, batch, cp).values()) < 1e-10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [n for n in MODELS if not {"before", "behind", "and"} & {*n.split()}])
def test_each_rank_computes_its_own_patches(name: str) -> None:
    program, *_ = captured(build(name))
    before = rows(program)
    assert rows(cut(program)) == [n // 2 for n in before]


def test_frames_are_cut_where_attention_stays_within_a_frame() -> None:
    program, *_ = captured(build("space and time"))
    attention = aten.scaled_dot_product_attention.default
    space, time = (shape_of(n) for n in cut(program).graph.graph.find_nodes(op="call_function", target=attention)[:2])
    assert (space[0], space[-2]) == (2 * 8 // 2, 16)
    assert (time[0], time[-2]) == (2 * 16, 8 // 2)


def test_the_plan_says_where_the_sequence_begins() -> None:
    program, *_ = captured(build("diffusion"))
    assert [(what, where.module) for what, where in cut(program).rewrites] == [(BEGINS, "blocks.0.qkv")]


LONGEST = {"patches of pixels": 16, "space and time": 8, "sound": 8, "images of 20 tokens before text": 8}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LONGEST)
def test_a_search_knows_how_long_it_is(name: str) -> None:
    assert longest_sequence(captured(build(name))[0]) == LONGEST[name]


def test_a_short_sequence_that_does_not_divide_is_computed_in_full_as_the_plan_says() -> None:
    program, *_ = captured(build("an image and 7 tokens"))
    said = [what for what, _ in cut(program).rewrites]
    full = f"every rank of cp computes aten.linear in full, {2 * 7 * 16 * 8:,} bytes"
    assert said[0] == f"a sequence of 7 is not divisible by 2·cp = 4: {full}"
    assert {2 * 7, 2 * 16 // 2} <= set(rows(program))


JOINED = {
    "5 tokens and an image": {2 * 5, 2 * 8, 2 * (5 + 8)},
    "images of 17 tokens before text": {2 * 8, 2 * (1 + 8), 2 * 24 // 2},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", JOINED)
def test_a_few_rows_joined_to_a_sequence_are_whole_beside_a_part_of_it(name: str) -> None:
    program, *_ = captured(build(name))
    assert set(rows(cut(program))) == JOINED[name]


def test_in_bfloat16_it_rounds_no_more_than_one_process() -> None:
    batch = build("5 tokens and an image").batch(4, 5)
    close_in_half(lambda: build("5 tokens and an image").model, [batch], {"cp": 2}, torch.bfloat16, torch.float64)


@pytest.mark.thorough
def test_text_that_is_more_than_half_of_the_patches_is_refused() -> None:
    program, *_ = captured(joint(9))
    with pytest.raises(PlanError, match="a sequence of 9 tokens is not divisible"):
        cut(program)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.end = nn.Linear(6, WIDTH), nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        return self.end(torch.cat([self.text(text), self.image(image)], 1).flatten(0, 1)).square().mean()


def test_rows_that_cannot_be_told_apart_any_more_are_refused_with_their_line() -> None:
    shapes: Any = {name: ((length, 6), torch.float32, None) for name, length in (("text", 5), ("image", 16))}
    program, *_ = captured(Entry(Flattened(), shapes))
    with pytest.raises(PlanError, match="a sequence of 42 tokens is not divisible") as caught:
        cut(program)
    assert "end" in str(caught.value.where)


def with_a_class_token(images: Tensor, stem: nn.Module) -> Tensor:
    x = of_convolution(images, stem)
    return torch.cat([x.mean(1, keepdim=True), x], 1)


def mixed(images: Tensor, stem: nn.Module, mix: nn.Module) -> Tensor:
    """Every patch of every other, as in an MLP-Mixer."""
    x = of_convolution(images, stem)
    return x + mix(x.transpose(1, 2)).transpose(1, 2)


def test_a_product_that_mixes_patches_is_refused() -> None:
    model = Classifier(nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(16, 16), patches=mixed, pool=lambda x: x.mean(1))
    program, *_ = captured(Entry(model.double(), dict(IMAGES)))
    with pytest.raises(PlanError, match=r"aten\.linear reads the whole sequence") as caught:
        cut(program)
    assert "blocks.0.qkv" in str(caught.value.where)


def test_a_number_of_patches_that_does_not_divide_is_named() -> None:
    model = Classifier(nn.Conv2d(3, WIDTH, 2, 2), patches=with_a_class_token, pool=lambda x: x[:, 0]).double()
    program, *_ = captured(Entry(model, dict(IMAGES)))
    with pytest.raises(PlanError, match="a sequence of 17 tokens is not divisible") as caught:
        cut(program)
    assert "blocks.0.qkv" in str(caught.value.where)
