"""The passes stand in one tuple and are run in its order; a rank gets modules over its local tensors."""

import pytest
import torch
from expecttest import assert_expected_inline

from passes import lower as lowering
from passes.base import LowerContext, Pass, StageGraph
from passes.lower import PASSES
from passes.ops.random_state import RandomState
from planner.lower import check_stages, lower
from tests.models.tiny import planned
from tests.tools.graphs import shown, stage_after


def test_the_order_of_the_passes():
    checks = [(step.name, *(check.__name__ for check in (*step.leaves, *step.leaves_slowly))) for step in PASSES]
    assert_expected_inline(
        "\n".join(map(" ".join, checks)),
        """\
insert_collectives readers_get_the_type_that_they_want
exchange_rows
exchange_sequence no_cp_placeholder_is_left
localize values_have_their_local_shape
keep_own_tokens
name_streams no_op_draws_from_the_default_generator
attend_by_documents
fuse_bias
sum_in_place
overwrite_logits
overlap_f
own_linears
place_devices no_op_names_another_device
drop_unread
note_choices
cut_regions regions_are_those_of_the_plan
compile_pieces pieces_are_those_of_the_plan
recompute
await_parameters parameters_are_awaited
gather_weights weights_are_whole""",
    )


def test_a_further_pass_is_one_more_entry(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, int]] = []

    def further(stage: StageGraph, context: LowerContext) -> None:
        seen.append((stage.index, context.tp.rank))

    monkeypatch.setattr(lowering, "PASSES", (*PASSES, Pass(further)))
    lower(planned("mlp mlp", 0.1, tp=2, pp=2), 3)
    assert seen == [(1, 1)]


def test_every_stage_can_be_checked_without_a_rank():
    check_stages(planned("mlp mlp", 0.1, tp=2, pp=2))


def test_a_finished_stage():
    assert_expected_inline(
        shown(stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "drop_unread", rank=2)),
        """\
weight_gradients = self.weight_gradients
random = self.random
tp = self.tp
add_1 = argument
labels = argument
denominator_0 = argument
p_blocks_1_up_weight = attribute
p_blocks_1_up_bias = attribute
p_blocks_1_down_weight = attribute
p_blocks_1_down_bias = attribute
p_head_weight = attribute
linear_default = linear.linear(add_1, p_blocks_1_up_weight, p_blocks_1_up_bias, False, weight_gradients)
gelu_1 = aten.gelu(linear_default)
linear_6 = linear.linear(gelu_1, p_blocks_1_down_weight, None, False, weight_gradients)
g = collectives.g(linear_6, tp, True)
linear_7 = aten.add.Tensor(g, p_blocks_1_down_bias)
stream_dropout = dropout.stream_dropout(linear_7, 0.1, random, 201555422170152, False)
f = collectives.f(stream_dropout, tp)
add_2 = aten.add.Tensor(add_1, f)
linear_8 = linear.linear(add_2, p_head_weight, None, False, weight_gradients)
flatten = aten.reshape(linear_8, [8, 8])
flatten_1 = aten.reshape(labels, [8])
vocabulary_cross_entropy = vocabulary.vocabulary_cross_entropy(flatten, flatten_1, tp, 16, reduction=2, in_place=True)
to_dtype = aten.to.dtype(denominator_0, torch.float32)
div_tensor = aten.div.Tensor(vocabulary_cross_entropy, to_dtype)
return (div_tensor)
""",
    )


def test_a_stage_module_has_local_parameters_on_meta_and_says_what_crosses_its_ends():
    program = lower(planned("mlp mlp", 0.1, tp=2, pp=2), 2)
    (stage,) = program.stages
    assert {p.fqn: tuple(stage.parameter(p.fqn).shape) for p in stage.parameters} == {
        "blocks.1.up.weight": (16, 8),
        "blocks.1.up.bias": (16,),
        "blocks.1.down.weight": (8, 16),
        "blocks.1.down.bias": (8,),
        "head.weight": (8, 8),
    }
    assert all(stage.parameter(p.fqn).is_meta for p in stage.parameters)
    assert [b.name for b in stage.receives] == ["add_1"]
    assert (stage.inputs, stage.denominators, stage.sends, stage.has_loss) == (("labels",), (0,), (), True)


def test_a_stage_that_draws_shares_the_random_state_of_the_rank():
    program = lower(planned("mlp mlp", 0.1, tp=2, pp=2), 0)
    assert isinstance(program.stages[0].module.random, RandomState)
    assert program.stages[0].module.random is program.random


def test_each_chunk_of_an_interleaved_rank_is_a_stage():
    program = lower(planned("mlp mlp mlp mlp", tp=1, pp=2, vpp=2), 1, torch.device("meta"))
    assert [(stage.index, stage.chunk) for stage in program.stages] == [(1, 0), (3, 1)]
