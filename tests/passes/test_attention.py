"""Attention spelled out computes what the fused op does: seen where both drop nothing, in an evaluation."""

import pytest

from passes.base import RankProgram
from passes.program.ops.aten import aten
from planner import plan
from tests.models.families import build
from tests.tools.simulated_mesh import equals_one_process, spec_of

WAYS = ["causal", "booleans", "numbers", "groups", "time_first"]


def evaluates(program: RankProgram) -> None:
    program.random.training = False


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_without_dropout_it_is_the_fused_op(way: str):
    name = f"dropping:{way}"
    equals_one_process(
        lambda: build(name).model.train(),
        build(name).batch(2, 0),
        {},
        loss=1e-12,
        each=(1e-9, 1e-12),
        truth=lambda: build(name).model.eval(),
        change=evaluates,
        dropout="layout_invariant",
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_no_attention_that_draws_is_left(way: str):
    entry = build(f"dropping:{way}")
    made = plan(entry.model.train(), spec_of(entry.batch(2, 0), {}, dropout="layout_invariant"))
    assert made.decisions is not None
    graph = made.decisions.program.graph.graph
    assert not graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    drawing = graph.find_nodes(op="call_function", target=aten.dropout.default)
    assert [node.meta["draw"].site for node in drawing] == list(range(len(drawing)))
