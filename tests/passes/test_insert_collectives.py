"""One collective on each edge whose ends differ in type, shared by all readers there."""

from __future__ import annotations

from expecttest import assert_expected_inline

from passes.ops import collectives
from passes.types.types import I, P, R
from tests.models.tiny import planned
from tests.tools.graphs import change_of, stage_after


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
