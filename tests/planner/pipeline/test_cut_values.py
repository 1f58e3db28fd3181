"""What crosses a cut between stages: sent once, or recomputed on the stage that reads it."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.capture.export import capture
from tests.models.small import VOCABULARY, WIDTH, Body, Layer, captured, hugging_face, tokens
from tests.tools.stages_in_turn import check_equals_whole, stage_of_parameter, stages_of


@pytest.mark.thorough
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_only_the_residual_crosses_a_cut_of_a_decoder_or_encoder(family: str, pp: int) -> None:
    program = hugging_face(family)
    stages = stages_of(program, pp)
    assert [len(cut) for cut in stages.live] == [1] * (pp - 1)
    for (name,) in stages.live:
        assert tuple(program.node(name).meta["val"].shape) == (2, 16, WIDTH)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_the_encoder_output_passes_through_every_decoder_stage(pp: int) -> None:
    program = hugging_face("t5")
    stages = stages_of(program, pp)
    encoder_end = max(s for s, blocks in enumerate(stages.blocks_of_stage) if 2 in blocks)
    decoder_reads = [set(cut) for cut in stages.live[encoder_end:]]
    assert all(len(cut) == 2 for cut in decoder_reads)
    assert all(a & b for a, b in pairwise(decoder_reads)), "one value crosses every cut of the decoder"


def test_masks_and_rotary_tables_are_recomputed_where_they_are_read() -> None:
    program = hugging_face("llama")
    stages = stages_of(program, 3)
    rotary = [n for n in stages.recomputed if program.node(n).target is torch.ops.aten.cos.default]
    assert [stages.copies[n] for n in rotary] == [(0, 1, 2)]
    assert not any(name in stages.recomputed for cut in stages.live for name in cut)


def test_labels_are_read_by_the_last_stage_alone() -> None:
    program = hugging_face("gpt2")
    assert stages_of(program, 3).parameter_stages["labels"] == (2,)


@pytest.mark.thorough
def test_a_position_bias_is_recomputed_and_its_parameter_is_on_every_stage_of_its_side() -> None:
    program = hugging_face("t5")
    stages = stages_of(program, 6)
    name = "{}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert stage_of_parameter(program, stages, name.format("encoder")) == (0, 1, 2)
    assert stage_of_parameter(program, stages, name.format("decoder")) == (3, 4, 5)


@pytest.mark.thorough
def test_recomputed_values_are_never_random() -> None:
    for family in ("gpt2", "bert", "t5"):
        program = hugging_face(family)
        targets = {program.node(n).target for n in stages_of(program, 3).recomputed}
        assert torch.ops.aten.dropout.default not in targets


def test_a_product_of_parameters_is_sent_and_a_scaled_parameter_is_not() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(2))
            self.scale = nn.Parameter(torch.empty(WIDTH))
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            product, scaled = self.a @ self.b, self.scale * 2
            for layer in self.layers:
                x = layer(x @ product) * scaled
            return x

    program = captured(Mixed)
    stages = stages_of(program, 2, split=[2, 2])
    assert stage_of_parameter(program, stages, "body.scale") == (0, 1)
    assert stage_of_parameter(program, stages, "body.a") == (0,)
    assert len(stages.live[0]) == 2
    check_equals_whole(program, stages)


@pytest.mark.thorough
def test_a_tuple_is_sent_as_its_pieces() -> None:
    def run(body: Body, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        for layer in body.layers:
            left = layer(left)
        return torch.cat([left, right], dim=1)

    program = captured(lambda: Body(run, layers=nn.ModuleList(Layer() for _ in range(4))))
    stages = stages_of(program, 4)
    assert all(isinstance(program.node(name).meta["val"], Tensor) for cut in stages.live for name in cut)
    assert [len(cut) for cut in stages.live] == [2, 2, 2]
    check_equals_whole(program, stages)


class Whisperer(nn.Module):
    """Encoder and decoder with embeddings of their own; the decoder's is tied to the head."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.sounds, self.words = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        if shared:
            self.sounds = self.words
        self.encoder, self.decoder = (nn.ModuleList(Layer() for _ in range(3)) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, y = self.sounds(input_ids), self.words(labels)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y) + x
        return F.cross_entropy((y @ self.words.weight.T).flatten(0, 1), labels.flatten())


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [False, True])
def test_a_decoder_embedding_waits_for_the_decoder_unless_its_weight_is_read_sooner(shared: bool) -> None:
    with torch.device("meta"):
        model = Whisperer(shared)
    program = capture(model, {"input_ids": tokens(), "labels": tokens()})
    stages = stages_of(program, 6)
    assert len(stages.live[0]) == (2 if shared else 1)
    fqn, expected = ("sounds.weight", (0, 5)) if shared else ("words.weight", (3, 5))
    assert stage_of_parameter(program, stages, fqn) == expected
    check_equals_whole(program, stages)
