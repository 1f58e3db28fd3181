"""A stage holds its part of the graph at global shapes, and hands over what the next one reads."""

import pytest
from expecttest import assert_expected_inline

from passes.ops.gathered_attention import of_gathered
from planner.lower import lower
from tests.models.families import Entry, build
from tests.models.tiny import planned
from tests.tools.graphs import shown, stage_after
from tests.tools.saved_memory import measured
from tests.tools.simulated_mesh import equals_one_process, exchanges_of, run_mesh


def test_the_first_stage_ends_with_what_it_sends():
    stage = stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "extract", rank=0)
    assert (stage.sends, stage.receives, stage.inputs, stage.has_loss) == (("add_1",), (), ("input_ids",), False)
    assert_expected_inline(
        shown(stage),
        """\
input_ids = argument
p_tokens_weight = attribute
p_positions_weight = attribute
p_blocks_0_up_weight = attribute
p_blocks_0_up_bias = attribute
p_blocks_0_down_weight = attribute
p_blocks_0_down_bias = attribute
embedding = aten.embedding(p_tokens_weight, input_ids)
arange = aten.arange(4, device=cpu, pin_memory=False)
embedding_1 = aten.embedding(p_positions_weight, arange)
add = aten.add.Tensor(embedding, embedding_1)
linear = aten.linear(add, p_blocks_0_up_weight)
linear_1 = aten.add.Tensor(linear, p_blocks_0_up_bias)
gelu = aten.gelu(linear_1)
linear_2 = aten.linear(gelu, p_blocks_0_down_weight)
linear_3 = aten.add.Tensor(linear_2, p_blocks_0_down_bias)
dropout = aten.dropout(linear_3, 0.1, True)
add_1 = aten.add.Tensor(add, dropout)
return (add_1)
""",
    )


def test_the_last_stage_takes_received_values_then_inputs_then_denominators_and_ends_with_the_loss():
    stage = stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "extract", rank=2)
    assert (stage.receives, stage.inputs, stage.denominators) == (("add_1",), ("labels",), ("denominator_0",))
    assert (stage.sends, stage.has_loss) == ((), True)
    assert_expected_inline(
        shown(stage),
        """\
add_1 = argument
labels = argument
denominator_0 = argument
p_blocks_1_up_weight = attribute
p_blocks_1_up_bias = attribute
p_blocks_1_down_weight = attribute
p_blocks_1_down_bias = attribute
p_head_weight = attribute
linear_4 = aten.linear(add_1, p_blocks_1_up_weight)
linear_5 = aten.add.Tensor(linear_4, p_blocks_1_up_bias)
gelu_1 = aten.gelu(linear_5)
linear_6 = aten.linear(gelu_1, p_blocks_1_down_weight)
linear_7 = aten.add.Tensor(linear_6, p_blocks_1_down_bias)
dropout_1 = aten.dropout(linear_7, 0.1, True)
add_2 = aten.add.Tensor(add_1, dropout_1)
linear_8 = aten.linear(add_2, p_head_weight)
flatten = aten.reshape(linear_8, [8, 16])
flatten_1 = aten.reshape(labels, [8])
cross_entropy_loss_default = aten.cross_entropy_loss(flatten, flatten_1, None, 2)
to_dtype = aten.to.dtype(denominator_0, torch.float32)
div_tensor = aten.div.Tensor(cross_entropy_loss_default, to_dtype)
return (div_tensor)
""",
    )


def test_every_node_knows_its_name_in_the_captured_graph():
    stage = stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "extract", rank=2)
    assert {name: node.meta["origin"] for name, node in stage.env.items()} == {name: name for name in stage.env}
    assert set(stage.env.values()) == {n for n in stage.graph.nodes if n.op != "output"}


# ---- products of gathered keys and values keep this rank's part, and gather again in the backward, as the plan lists


def entry_of(name: str) -> Entry:
    entry = build(name)
    entry.inputs = {n: ((16, *s[1:]), *rest) for n, (s, *rest) in entry.inputs.items()}  # pyright: ignore
    return entry


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=["cp2", "cp2-tp2"])
@pytest.mark.parametrize("name", ["bloom", "t5", "gemma2"])
def test_it_equals_one_process_and_exchanges_what_the_rows_say(name: str, mesh: dict[str, int]) -> None:
    batch = entry_of(name).batch(2, 3)
    ran = equals_one_process(lambda: build(name).model, batch, mesh, loss=1e-6, gradient=1e-6)
    for fqn, gradient in ran.truth.gradients.items():
        assert (ran.gradients[fqn] - gradient).abs().max() <= 2e-6 * gradient.abs().max(), fqn
    listed = exchanges_of(ran.plan)
    assert listed["cp", "all_gather", "backward"] == listed["cp", "all_gather", "forward"]


@pytest.mark.thorough
def test_what_a_stage_keeps_falls_as_the_tokens_of_a_rank() -> None:
    def activations(cp: int) -> int:
        made = run_mesh(lambda: build("bloom").model, entry_of("bloom").batch(2, 3), {"cp": cp}).plan
        assert all(n.target is not of_gathered for n in made.to_run()[0].program.graph.graph.nodes)
        return made.memory[0].activations

    one, two, four = (activations(cp) for cp in (1, 2, 4))
    assert 2 * two <= 1.05 * one
    assert 4 * four <= 1.05 * one


@pytest.mark.thorough
def test_recomputed_blocks_keep_their_gathers() -> None:
    batch = entry_of("bloom").batch(2, 3)
    ran = run_mesh(lambda: build("bloom").model, batch, {"cp": 2}, recompute="full")
    targets = {n.target for n in lower(ran.plan, 0).stages[0].module.graph.nodes}
    assert of_gathered not in targets


@pytest.mark.thorough
def test_the_plan_knows_to_the_byte_what_is_kept() -> None:
    for name in ("bloom", "t5"):
        made, kept = measured(lambda name=name: build(name).model, entry_of(name).batch(2, 3), {"cp": 2})
        assert [rank.total for rank in kept] == [made.memory[0].of_microbatch[0]] * 2
