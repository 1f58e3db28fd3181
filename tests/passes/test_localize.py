"""Written sizes become this rank's, and a few ops become their parallel form."""

from __future__ import annotations

from expecttest import assert_expected_inline

from tests.models.tiny import planned
from tests.tools.graphs import change_of, shown, stage_after


def test_heads_embedding_and_loss_of_a_rank():
    assert_expected_inline(
        change_of(planned("attention", tp=2), "localize"),
        """\
localize             43 → 43 nodes: + 2 vocabulary.vocabulary_embedding, + 1 vocabulary.vocabulary_cross_entropy, − 2 aten.embedding, − 1 aten.cross_entropy_loss; 8 changed
- embedding = aten.embedding(p_tokens_weight, input_ids)
+ vocabulary_embedding = vocabulary.vocabulary_embedding(p_tokens_weight, input_ids, tp, 16)
- embedding_1 = aten.embedding(p_positions_weight, arange)
- add = aten.add.Tensor(embedding, embedding_1)
+ vocabulary_embedding_1 = vocabulary.vocabulary_embedding(p_positions_weight, arange, tp, 4)
+ add = aten.add.Tensor(vocabulary_embedding, vocabulary_embedding_1)
- split = aten.split_with_sizes(linear_1, [8, 8, 8], 2)
+ split = aten.split_with_sizes(linear_1, [4, 4, 4], 2)
- view = aten.reshape(getitem, [2, 4, 2, 4])
+ view = aten.reshape(getitem, [2, 4, 1, 4])
- view_1 = aten.reshape(getitem_1, [2, 4, 2, 4])
+ view_1 = aten.reshape(getitem_1, [2, 4, 1, 4])
- view_2 = aten.reshape(getitem_2, [2, 4, 2, 4])
+ view_2 = aten.reshape(getitem_2, [2, 4, 1, 4])
- reshape = aten.reshape(transpose_3, [2, 4, 8])
+ reshape = aten.reshape(transpose_3, [2, 4, 4])
- flatten = aten.reshape(linear_4, [8, 16])
+ flatten = aten.reshape(linear_4, [8, 8])
- cross_entropy_loss_default = aten.cross_entropy_loss(flatten, flatten_1, None, 2)
+ vocabulary_cross_entropy = vocabulary.vocabulary_cross_entropy(flatten, flatten_1, tp, 16, reduction=2)
- div_tensor = aten.div.Tensor(cross_entropy_loss_default, to_dtype)
+ div_tensor = aten.div.Tensor(vocabulary_cross_entropy, to_dtype)
""",  # noqa: E501
    )


def test_without_tensor_parallelism_nothing_changes():
    before, after = (
        shown(stage_after(planned("mlp mlp", 0.1, pp=2), name)) for name in ("insert_collectives", "localize")
    )
    assert before == after


def test_both_tp_ranks_have_the_same_graph():
    first, second = (shown(stage_after(planned("attention", tp=2), "localize", rank)) for rank in (0, 1))
    assert first == second
