"""What each pass changed, as ``meshwright plan --passes`` prints it."""

import pytest
from expecttest import assert_expected_inline

from passes.errors import PlanError
from planner.lower import passes_text
from tests.models.tiny import planned


def test_what_the_passes_change_for_a_rank_equal_lines_of_blocks_once():
    assert_expected_inline(
        passes_text(planned("mlp mlp mlp mlp", 0.1, tp=2, pp=2), 3) + "\n",
        """\
stage 1 of rank 3
  extract              33 nodes
  insert_collectives   33 → 38 nodes: + 1 self.tp, + 2 collectives.g, + 2 collectives.f; 4 changed
            + tp = self.tp
       2 ×  - linear_11 = aten.add.Tensor(linear_10, p_blocks_2_down_bias)
       2 ×  + g = collectives.g(linear_10, tp)
       2 ×  + linear_11 = aten.add.Tensor(g, p_blocks_2_down_bias)
            - add_3 = aten.add.Tensor(add_2, dropout_2)
       2 ×  + f = collectives.f(dropout_2, tp)
            + add_3 = aten.add.Tensor(add_2, f)
            - add_4 = aten.add.Tensor(add_3, dropout_3)
            + add_4 = aten.add.Tensor(add_3, f_1)
  exchange_rows        38 → 38 nodes: nothing changed
  exchange_sequence    38 → 38 nodes: nothing changed
  localize             38 → 38 nodes: + 1 vocabulary.vocabulary_cross_entropy, − 1 aten.cross_entropy_loss; 2 changed
            - flatten = aten.reshape(linear_16, [8, 16])
            + flatten = aten.reshape(linear_16, [8, 8])
            - cross_entropy_loss_default = aten.cross_entropy_loss(flatten, flatten_1, None, 2)
            + vocabulary_cross_entropy = vocabulary.vocabulary_cross_entropy(flatten, flatten_1, tp, 16, reduction=2)
            - div_tensor = aten.div.Tensor(cross_entropy_loss_default, to_dtype)
            + div_tensor = aten.div.Tensor(vocabulary_cross_entropy, to_dtype)
  keep_own_tokens      38 → 38 nodes: nothing changed
  name_streams         38 → 39 nodes: + 1 self.random, + 2 dropout.stream_dropout, − 2 aten.dropout; 2 changed
            + random = self.random
       2 ×  - dropout_2 = aten.dropout(linear_11, 0.1, True)
       2 ×  - f = collectives.f(dropout_2, tp)
            + stream_dropout = dropout.stream_dropout(linear_11, 0.1, random, 238821743569626, False)
       2 ×  + f = collectives.f(stream_dropout, tp)
            + stream_dropout_1 = dropout.stream_dropout(linear_15, 0.1, random, 118427780859226, False)
  attend_by_documents  39 → 39 nodes: nothing changed
  fuse_bias            39 → 37 nodes: − 2 aten.add.Tensor; 2 changed
            - linear_8 = aten.linear(add_2, p_blocks_2_up_weight)
       2 ×  - linear_9 = aten.add.Tensor(linear_8, p_blocks_2_up_bias)
       2 ×  - gelu_2 = aten.gelu(linear_9)
            + linear_default = aten.linear(add_2, p_blocks_2_up_weight, p_blocks_2_up_bias)
       2 ×  + gelu_2 = aten.gelu(linear_default)
            - linear_12 = aten.linear(add_3, p_blocks_3_up_weight)
            + linear_default_1 = aten.linear(add_3, p_blocks_3_up_weight, p_blocks_3_up_bias)
  sum_in_place         37 → 37 nodes: 2 changed
       2 ×  - g = collectives.g(linear_10, tp)
       2 ×  + g = collectives.g(linear_10, tp, True)
  overwrite_logits     37 → 37 nodes: 1 changed
            - vocabulary_cross_entropy = vocabulary.vocabulary_cross_entropy(flatten, flatten_1, tp, 16, reduction=2)
            + vocabulary_cross_entropy = vocabulary.vocabulary_cross_entropy(flatten, flatten_1, tp, 16, reduction=2, in_place=True)
  overlap_f            37 → 37 nodes: nothing changed
  own_linears          37 → 38 nodes: + 1 self.weight_gradients, + 5 linear.linear, − 5 aten.linear; 5 changed
            + weight_gradients = self.weight_gradients
            - linear_default = aten.linear(add_2, p_blocks_2_up_weight, p_blocks_2_up_bias)
            + linear_default = linear.linear(add_2, p_blocks_2_up_weight, p_blocks_2_up_bias, False, weight_gradients)
       2 ×  - linear_10 = aten.linear(gelu_2, p_blocks_2_down_weight)
       2 ×  + linear_10 = linear.linear(gelu_2, p_blocks_2_down_weight, None, False, weight_gradients)
            - linear_default_1 = aten.linear(add_3, p_blocks_3_up_weight, p_blocks_3_up_bias)
            + linear_default_1 = linear.linear(add_3, p_blocks_3_up_weight, p_blocks_3_up_bias, False, weight_gradients)
            - linear_16 = aten.linear(add_4, p_head_weight)
            + linear_16 = linear.linear(add_4, p_head_weight, None, False, weight_gradients)
  place_devices        38 → 38 nodes: nothing changed
  drop_unread          38 → 38 nodes: nothing changed
  note_choices         38 → 38 nodes: nothing changed
  cut_regions          38 → 38 nodes: nothing changed
  compile_pieces       38 → 38 nodes: nothing changed
  recompute            38 → 38 nodes: nothing changed
  await_parameters     38 → 38 nodes: nothing changed
  gather_weights       38 → 38 nodes: nothing changed
""",  # noqa: E501
    )


def test_full_repeats_the_lines_of_every_block():
    plan = planned("mlp mlp mlp mlp", 0.1, tp=2, pp=2)
    folded, full = (passes_text(plan, 3, full=full) for full in (False, True))
    assert "2 ×" in folded
    assert "×" not in full
    assert len(full.splitlines()) == sum(_times(line) for line in folded.splitlines())


def _times(line: str) -> int:
    first = line.split()[0]
    return int(first) if "×" in line else 1


def test_every_stage_of_an_interleaved_rank_is_told():
    text = passes_text(planned("mlp mlp mlp mlp", tp=1, pp=2, vpp=2), 1)
    assert [line for line in text.splitlines() if line.startswith("stage")] == [
        "stage 1 of rank 1",
        "stage 3 of rank 1",
    ]


@pytest.mark.parametrize("rank", [-1, 4])
def test_an_unknown_rank_is_one_clear_error(rank):
    with pytest.raises(PlanError) as error:
        passes_text(planned("mlp mlp", 0.1, tp=2, pp=2), rank)
    assert str(error.value) == f"there is no rank {rank}: the mesh has 4\n  at:  --rank\n  fix: give a rank from 0 to 3"
