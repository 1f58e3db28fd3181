"""Each rank's graph has its own sizes, collectives where types change, and gradients by the parts that readers give."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from passes.ops import collectives
from passes.own_linears import contributions
from passes.types.types import I, P, R
from planner import plan
from planner.lower import lower
from tests.models.plannable import build, spec_of
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


# ---- one collective on each edge whose ends differ in type, shared by all readers there


def test_an_mlp_has_one_change_before_up_and_one_g_before_the_bias_of_down():
    plan = planned("mlp mlp", 0.1, tp=2, pp=2)
    assert_expected_inline(
        change_of(plan, "insert_collectives"),
        """\
insert_collectives   19 → 23 nodes: + 1 self.tp, + 1 collectives.g_f, + 1 collectives.g, + 1 collectives.f; 3 changed
+ tp = self.tp
- linear = aten.linear(add, p_blocks_0_up_weight)
+ g_f = collectives.g_f(add, tp)
+ linear = aten.linear(g_f, p_blocks_0_up_weight)
- linear_3 = aten.add.Tensor(linear_2, p_blocks_0_down_bias)
+ g = collectives.g(linear_2, tp)
+ linear_3 = aten.add.Tensor(g, p_blocks_0_down_bias)
- add_1 = aten.add.Tensor(add, dropout)
+ f = collectives.f(dropout, tp)
+ add_1 = aten.add.Tensor(g_f, f)
""",
    )


def test_a_collective_is_shared_by_the_readers_of_one_type():
    stage = stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "insert_collectives")
    (shared,) = stage.graph.find_nodes(op="call_function", target=collectives.g_f)
    assert {reader.name for reader in shared.users} == {"linear", "add_1"}
    assert (shared.all_input_nodes[0].meta["placement"], shared.meta["placement"]) == (P, R)


def test_without_tensor_parallelism_nothing_is_inserted_and_every_value_has_a_type():
    stage = stage_after(planned("mlp mlp", 0.1, pp=2), "insert_collectives")
    assert {n.meta["placement"] for n in stage.graph.nodes if n.op != "output"} == {I}


def test_a_received_value_has_the_type_in_which_it_was_sent():
    stage = stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "insert_collectives", rank=2)
    sent = stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "insert_collectives", rank=0)
    (value,) = sent.graph.output_node().args[0]  # pyright: ignore
    assert stage.env["add_1"].meta["placement"] == value.meta["placement"]


def test_under_sequence_parallelism_the_cut_stands_in_the_generated_code():
    stage = stage_after(planned("attention", tp=2, sequence_parallel=True), "insert_collectives")
    calls = [n for n in stage.graph.nodes if n.target in (collectives.gather, collectives.scatter)]
    assert calls
    assert "Placement(kind='V', dim=1" in stage.graph.python_code("self").src


# ---- how often a backward gives the gradient of a parameter


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", ["gpt", "gpt2", "llama"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_blocks_give_each_gradient_as_often(model: str, recompute: str):
    counts = []
    for asked in ("none", recompute):
        made = plan(build(model), spec_of(model, mesh={"tp": 2}, recompute=asked))
        (stage,) = lower(made, 0).stages
        counts.append(contributions(stage.module, stage.module.graph))
    assert counts[0] == counts[1]
    assert set(counts[0].values()) <= {1, 2}


class Gated(nn.Module):
    """``up`` is read twice: for a value, and for what ``ends`` makes of it without a gradient."""

    def __init__(self, ends: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.unread = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        gate = self.ends(self.unread(x)) if self.ends is torch.detach else 1.0
        return F.silu(self.down(torch.where(self.ends(self.up(x)) > 0, self.up(x + 1), gate * x))).square().mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ends", [torch.detach, torch.ones_like, lambda x: x, lambda x: x.argmax(-1, keepdim=True)])
def test_a_reader_that_no_backward_reaches_gives_no_gradient(ends: Callable[[Tensor], Tensor]):
    inputs = {"x": {"shape": [4, 8], "dtype": "float32"}}
    made = plan(Gated(ends), {"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": inputs})
    (stage,) = lower(made, 0).stages
    counts = contributions(stage.module, stage.module.graph)
    assert [times for times in counts.values() if times] == [1] * 4  # weights and biases of up and of down
