"""Biases go back into products where nothing stands between; devices are the rank's; what nobody reads goes."""

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from passes.base import StageGraph
from passes.ops import collectives
from passes.peephole import drop_unread, fuse_bias, loses_logits, overwrite_logits, place_devices
from passes.types.types import I, Placement, V
from tests.models.tiny import planned
from tests.tools.graphs import bare_context, shown, stage_after

pytestmark = pytest.mark.check

aten = torch.ops.aten


def with_bias(
    target: object = aten.linear.default, *, between: bool = False, read_twice: bool = False, bias: Placement = I
) -> StageGraph:
    """x W + b, with a collective between product and bias, or the product read by another op too."""
    stage = StageGraph(0, fx.Graph(), nn.Module())
    graph = stage.graph

    def typed(node: fx.Node, placement: Placement, *shape: int) -> fx.Node:
        node.meta = {"val": torch.empty(shape, device="meta"), "placement": placement, "origin": node.name}
        return node

    x = typed(graph.placeholder("x"), I, 3, 4)
    w = typed(graph.create_node("get_attr", "w"), V(0, 4), 4, 4)
    b = typed(graph.create_node("get_attr", "b"), bias, 4)
    product = typed(graph.call_function(target, (x, w)), V(1, 4), 3, 4)  # pyright: ignore
    summed = typed(graph.call_function(collectives.g, (product,)), I, 3, 4) if between else product
    result = typed(graph.call_function(aten.add.Tensor, (summed, b)), V(1, 4), 3, 4)
    graph.output((result, product) if read_twice else (result,))
    return stage


def fused(stage: StageGraph) -> str:
    fuse_bias(stage, bare_context())
    stage.graph.lint()
    return shown(stage).splitlines()[-2]


def test_a_linear_gets_its_bias_back():
    assert fused(with_bias()) == "linear_default_1 = aten.linear(x, w, b)"


def test_a_product_of_matrices_becomes_addmm():
    assert fused(with_bias(aten.mm.default)) == "addmm_default = aten.addmm(b, x, w)"


@pytest.mark.parametrize("changes", [{"between": True}, {"read_twice": True}])
def test_a_bias_stays_where_a_collective_or_another_reader_is_in_the_way(changes):
    assert fused(with_bias(**changes)).startswith("add_tensor = aten.add.Tensor(")


def test_a_cut_bias_is_not_added_to_a_whole_product():
    stage = with_bias(bias=V(0, 4))
    stage.graph.find_nodes(op="call_function", target=aten.linear.default)[0].meta["placement"] = I
    assert fused(stage).startswith("add_tensor = aten.add.Tensor(")


def test_every_device_is_the_ranks():
    stage = stage_after(planned("mlp mlp", 0.1, tp=2, pp=2), "fuse_bias")
    assert "device=cpu" in shown(stage)
    context = replace(bare_context(), device=torch.device("cuda", 3))
    place_devices(stage, context)
    assert "device=cuda:3" in shown(stage)
    assert "device=cpu" not in shown(stage)


def test_what_nobody_reads_goes_but_arguments_stay():
    stage = with_bias()
    with stage.graph.inserting_before(stage.graph.output_node()):
        unread = stage.graph.call_function(aten.gelu.default, (stage.graph.find_nodes(op="placeholder")[0],))
        stage.graph.placeholder("unread_argument")
    drop_unread(stage, bare_context())
    assert unread not in stage.graph.nodes
    assert "unread_argument = argument" in shown(stage)


def head_and_loss(*, read_twice: bool = False, dtype: torch.dtype = torch.float32, classes: bool = True) -> StageGraph:
    """cross_entropy(reshape(x W), targets)."""
    stage = StageGraph(0, fx.Graph(), nn.Module())
    graph = stage.graph

    def typed(node: fx.Node, dtype: torch.dtype, *shape: int) -> fx.Node:
        node.meta = {"val": torch.empty(shape, dtype=dtype, device="meta"), "placement": I, "origin": node.name}
        return node

    x, w = typed(graph.placeholder("x"), dtype, 2, 3, 4), typed(graph.create_node("get_attr", "w"), dtype, 5, 4)
    target = (
        typed(graph.placeholder("target"), torch.int64, 6) if classes else typed(graph.placeholder("p"), dtype, 6, 5)
    )
    logits = typed(graph.call_function(aten.linear.default, (x, w)), dtype, 2, 3, 5)
    rows = typed(graph.call_function(aten.reshape.default, (logits, [6, 5])), dtype, 6, 5)
    loss = typed(graph.call_function(aten.cross_entropy_loss.default, (rows, target, None, 2)), dtype)
    graph.output((loss, logits) if read_twice else (loss,))
    return stage


def with_loss(**changes: object) -> str:
    stage = head_and_loss(**changes)  # pyright: ignore[reportArgumentType]
    overwrite_logits(stage, bare_context())
    stage.graph.lint()
    return shown(stage).splitlines()[-2]


def test_a_loss_takes_the_memory_of_logits_that_only_it_reads():
    assert "cross_entropy_in_place(reshape_default, target" in with_loss()


@pytest.mark.parametrize("changes", [{"read_twice": True}, {"dtype": torch.bfloat16}, {"classes": False}])
def test_logits_stay_where_others_read_them_or_the_loss_needs_another_memory(changes):
    assert "aten.cross_entropy_loss(" in with_loss(**changes)


def test_logits_that_are_one_of_several_results_stay():
    graph = fx.Graph()
    x, target = graph.placeholder("x"), graph.placeholder("target")
    x.meta, target.meta = ({"val": torch.empty(*shape, device="meta")} for shape in ((2, 6, 5), (6,)))
    parts = graph.call_function(aten.unbind.int, (x,))
    parts.meta = {"val": list(x.meta["val"].unbind())}
    rows = graph.call_function(operator.getitem, (parts, 0))
    rows.meta = {"val": parts.meta["val"][0]}
    assert not loses_logits(graph.call_function(aten.cross_entropy_loss.default, (rows, target)))
