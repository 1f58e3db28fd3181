"""Blocks with experts: what a graph captures ends where rows leave, or meet the first weights of experts."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import fx, nn

from passes.moe import exchange
from passes.moe.domain import domain_of
from passes.pieces import Region
from planner import Plan, PlanError, plan
from tests.models import experts, hugging_face, selected_rows
from tests.tools.captures import plan_again

SCOPE = ("attn", "moe_router", "moe_preprocess")
ONE: dict[str, int] = {}
SPREAD = {"dp": 2, "ep": 2}
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe")
EXCHANGE = {exchange.meet, exchange.dispatch, exchange.give_back}


def own(way: experts.Way, **options: Any) -> nn.Module:
    layer = partial(selected_rows.Selecting if way in selected_rows.WAYS else experts.Layer, way)
    return experts.Blocks(layer, **options)


@cache
def planned(name: str | Callable[..., Any], mesh: tuple[tuple[str, int], ...], *scope: str) -> Plan:
    torch.manual_seed(0)
    model = hugging_face.build(name) if isinstance(name, str) else own(name)
    length, high = (8, hugging_face.VOCABULARY) if isinstance(name, str) else (experts.LENGTH, experts.VOCABULARY)
    inputs = {key: {"shape": [length], "dtype": "int64", "high": high} for key in ("input_ids", "labels")}
    spec = {"mesh": dict(mesh), "batch": {"global": 8, "micro": 2}, "inputs": inputs}
    spec["tensor_parallel"] = {"vocabulary_multiple": 8}
    return plan_again(model, {**spec, "cuda_graphs": {"impl": "emulate", "scope": list(scope)}})


def made(name: str | Callable[..., Any], mesh: dict[str, int], *scope: str) -> Plan:
    return planned(name, tuple(mesh.items()), *scope)


def calls(decided: Plan, region: Region) -> list[fx.Node]:
    return [decided.to_run()[0].program.node(name) for name in region.nodes]


def of(decided: Plan, scope: str) -> list[Region]:
    return [region for region in decided.regions if region.scope == scope]


def crossing(listed: dict[Any, Any]) -> set[str]:
    return {name for name, _ in listed}


def called(made: object) -> str:
    """The same in every process that collects."""
    return getattr(made, "__name__", str(made))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [ONE, SPREAD], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, selected_rows.index_add, experts.masks], ids=called)
def test_the_router_ends_with_choices_and_the_rest_before_the_experts(name, mesh):
    decided = made(name, mesh, *SCOPE)
    decisions = decided.to_run()[0]
    assert all(row.captured for row in decided.graph_regions)
    assert len(of(decided, "moe_router")) == len(of(decided, "moe_preprocess")) == len(decisions.experts.layers)
    for layer, router, order in zip(
        decisions.experts.layers, of(decided, "moe_router"), of(decided, "moe_preprocess"), strict=True
    ):
        assert {layer.logits, *layer.chosen} <= router.nodes
        weighting = router.nodes if isinstance(name, str) else router.nodes | order.nodes
        assert set(layer.probs) <= weighting
        assert not router.nodes & order.nodes
        assert crossing(router.outputs) & crossing(order.inputs)
        weights = {name for weight in layer.weights for name in weight.nodes}
        for node in (*calls(decided, router), *calls(decided, order)):
            assert domain_of(node) is None
            assert node.target not in EXCHANGE
            assert node.name not in layer.products
            assert weights.isdisjoint(n.name for n in node.all_input_nodes)


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*FAMILIES, selected_rows.index_add, experts.masks], ids=called)
def test_what_ranks_tell_each_other_and_the_rows_that_leave_are_made_in_front_of_the_cut(name):
    decided = made(name, SPREAD, *SCOPE)
    graph = decided.to_run()[0].program.graph.graph
    before = {name for scope in SCOPE[1:] for region in of(decided, scope) for name in region.nodes}
    left = {name for region in of(decided, "moe_preprocess") for name in crossing(region.outputs)}
    met = graph.find_nodes(op="call_function", target=exchange.meet)
    assert {n.name for meet in met for n in meet.all_input_nodes} <= left
    sent = graph.find_nodes(op="call_function", target=exchange.dispatch)
    assert {n.args[0].name for n in sent} <= before
    inside = {name for region in decided.regions for name in region.nodes}
    assert inside.isdisjoint(n.name for target in EXCHANGE for n in graph.find_nodes(op="call_function", target=target))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe"])
def test_an_expert_that_all_tokens_share_is_made_beside_the_router(name):
    decided = made(name, SPREAD, *SCOPE)
    program = decided.to_run()[0].program
    shared = {node for node, fqn in program.parameters.items() if "shared_expert" in fqn}
    readers = {user.name for node in shared for user in program.node(node).users}
    assert readers
    assert readers <= {name for region in of(decided, "moe_router") for name in region.nodes}


def test_dense_blocks_have_an_mlp_and_blocks_with_experts_their_parts():
    decided = made("deepseek_v3", SPREAD, *SCOPE, "mlp")
    assert [(row.block[-1], row.scope, row.captured) for row in decided.graph_regions] == [
        ("0", "attn", True),
        ("0", "mlp", True),
        ("1", "attn", True),
        ("1", "moe_router", True),
        ("1", "moe_preprocess", True),
    ]


@pytest.mark.parametrize(("scope", "kept"), [((), 1), (("mlp",), 1), (("attn", "mlp"), 3)])
def test_what_holds_the_exchange_is_refused_by_line_and_dense_blocks_are_captured(scope, kept):
    decided = made("deepseek_v3", SPREAD, *scope)
    (refused,) = [row for row in decided.graph_regions if not row.captured]
    assert refused.block == "model.layers.1"
    assert "rows are dispatched to the ranks of their experts, and the host waits for the counts" in refused.reason
    assert "modeling_deepseek_v3.py:" in refused.reason
    assert sum(row.captured for row in decided.graph_regions) == kept
    assert refused.reason.partition("(")[0] in decided.describe()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scope", ["moe", "mlp", "full_iteration"])
@pytest.mark.parametrize("name", ["mixtral", experts.columns], ids=called)
def test_experts_on_other_ranks_are_in_no_graph(name, scope):
    with pytest.raises(PlanError, match=r"no CUDA graph can .*the host waits for the counts") as error:
        made(name, SPREAD, scope)
    assert ".py:" in str(error.value)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("scope", [("moe",), ("mlp",), (), ("moe_router", "moe_preprocess")])
def test_slots_on_other_ranks_are_of_a_fixed_number(scope):
    decided = made(experts.slots, SPREAD, *scope)
    assert all(row.captured for row in decided.graph_regions)
    program, layers = decided.to_run()[0].program, decided.to_run()[0].experts.layers
    for layer in layers:
        assert program.node(layer.sent[0]).target is exchange.send_slots
        held = [layer.sent[0] in region.nodes for region in decided.regions]
        assert sum(held) == (0 if "moe_router" in scope else 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [w for w in experts.WAYS if w is not experts.picked], ids=lambda w: w.__name__)
def test_experts_whose_sizes_are_fixed_are_captured_whole(way):
    decided = made(way, ONE, "attn", "moe")
    assert [row.scope for row in decided.graph_regions] == ["attn", "moe"] * 2
    assert all(row.captured for row in decided.graph_regions)
    for layer, region in zip(decided.to_run()[0].experts.layers, of(decided, "moe"), strict=True):
        assert {layer.logits, *layer.products, layer.combined} <= region.nodes


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_rows_sorted_by_expert_are_not_of_a_fixed_number(name):
    with pytest.raises(PlanError, match="depends on the routing: moe needs fixed-size slots") as error:
        made(name, ONE, "moe")
    assert "mlp.experts   (moe.py:" in str(error.value)


@pytest.mark.parametrize("scope", ["mlp", "full_iteration"])
def test_grouped_products_that_are_a_loop_in_python_are_refused_by_line(scope):
    with pytest.raises(
        PlanError, match=r"grouped_mm_fallback\.default reads the row counts of experts on the host"
    ) as error:
        made("mixtral", ONE, scope)
    assert "mlp.experts   (moe.py:" in str(error.value)


def test_what_only_looks_like_experts_is_said_where_a_router_is_asked_for():
    def missing() -> Plan:
        model = experts.Blocks(experts.Missing)
        inputs = {key: {"shape": [experts.LENGTH], "dtype": "int64"} for key in ("input_ids", "labels")}
        spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs}
        return plan(model, {**spec, "cuda_graphs": {"impl": "emulate", "scope": ["moe_router"]}})

    with pytest.raises(PlanError, match=r"part moe_router .* apparent experts are not recognized"):
        missing()
