"""Weights and masks of a loop's branches are read off the choices; one index of a dim is seen in every op."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from passes.moe import exchange
from passes.moe.ties import picks
from passes.program.ops.aten import aten, packet_of
from tests.models import experts
from tests.models.experts import Layer
from tests.numeric.test_expert_layouts import batch_of, built, check
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of

LOOP: dict[str, int] = {}
SPREAD = {"dp": 2, "ep": 2}


def indexed(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """As Mixtral was written: each expert on the rows that chose it."""
    rows, flat = x.flatten(0, 1), chosen.flatten(0, 1)
    y = torch.zeros_like(rows)
    for number, expert in enumerate(layer.experts):
        token, place = torch.where(flat == number)
        y = y.index_add(0, token, expert(rows[token]) * probs.flatten(0, 1)[token, place, None])
    return y.view_as(x)


def straight_through(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Weights with the values of the choices and a gradient of the router's logits beside theirs."""
    y, logits = torch.zeros_like(x), layer.gate(x)
    for number, expert in enumerate(layer.experts):
        mine = chosen == number
        side = logits[..., number, None]
        weight = (probs * mine).sum(-1, keepdim=True) + (side - side.detach()) * mine.any(-1, keepdim=True)
        y = y + expert(x) * weight
    return y


def halved(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """The gradient of a weight is half of what its value says."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        own = (probs * (chosen == number)).sum(-1, keepdim=True)
        y = y + expert(x) * (own / 2 + own.detach() / 2)
    return y


def masked_otherwise(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """A mask that is True for the first choice alone."""
    y = torch.zeros_like(x)
    for number, expert in enumerate(layer.experts):
        first = (chosen[..., :1] == number).expand_as(x)
        y = y + torch.where(first, expert(x) * (probs * (chosen == number)).sum(-1, keepdim=True), 0.0)
    return y


WAYS = (experts.masks, experts.columns, indexed, straight_through, halved, masked_otherwise)


def loop_of(way: experts.Way) -> Layer:
    """A layer with a ModuleList of experts, and a way of its own to write it."""
    layer = Layer(experts.masks)
    layer.way = way
    return layer


def calls_of(way: Callable[..., Tensor]) -> Counter[object]:
    made = plan_again(built(partial(loop_of, way)), spec_of(batch_of(2), LOOP))
    graph = made.to_run()[0].program.graph.graph
    return Counter(packet_of(n.target) if n.op == "call_function" else None for n in graph.nodes)


@pytest.mark.check
@pytest.mark.parametrize("way", [experts.masks, experts.columns, indexed])
def test_a_loop_sends_rows_and_one_weight_and_hides_nothing(way: Callable[..., Tensor]) -> None:
    found = calls_of(way)
    assert found[exchange.dispatch] == 2
    assert not found[aten.where]
    assert not found[aten.any]
    assert not found[aten.eq]


def test_a_mask_that_hides_rows_stays() -> None:
    assert calls_of(masked_otherwise)[aten.where]


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [LOOP, SPREAD], ids=["alone", "spread"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_equals_one_process(way: Callable[..., Tensor], mesh: dict[str, int]) -> None:
    check(lambda: built(partial(loop_of, way)), mesh)


class RoutedTwice(Layer):
    """A router that is called for the choices, and again for the weights; experts with a norm in common."""

    def __init__(self) -> None:
        super().__init__(experts.masks)
        norm = torch.nn.LayerNorm(8)
        self.experts = torch.nn.ModuleList(torch.nn.Sequential(norm, expert) for expert in self.experts)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1).topk(self.top_k, -1)[1]
        return experts.masks(self, x, self.gate(x).softmax(-1).gather(-1, chosen), chosen)


@pytest.mark.parametrize("mesh", [SPREAD, {"cp": 2, "tp": 2, "ep": 4, "etp": 1}], ids=str)
def test_equal_calls_that_become_one_keep_the_gradient_of_each(mesh: dict[str, int]) -> None:
    """Of a call that leads to choices alone no gradient is wanted; of its equal one is."""
    check(lambda: built(RoutedTwice), mesh, length=8)
    made = plan_again(built(RoutedTwice), spec_of(batch_of(4, 8), SPREAD))
    graph = made.to_run()[0].program.graph.graph
    assert len([n for n in graph.nodes if n.target is aten.softmax.int]) == 1


# ---- one index of a dim is seen in every op of the canonical form that takes one, and in no call that takes several


SHAPE = (3, 4, 5)


def calls(*made: tuple[Any, ...]) -> fx.Node:
    """A value of SHAPE with these readers, of lists all items too."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(SHAPE, device="meta")
    for op, *args in made:
        node = graph.call_function(op, (x, *args))
        node.meta["val"] = op(x.meta["val"], *args)
        for i, value in enumerate(node.meta["val"] if isinstance(node.meta["val"], list | tuple) else ()):
            graph.call_function(getitem, (node, i)).meta["val"] = value
    return x


@pytest.mark.parametrize(
    ("op", "args", "found"),
    [
        (aten.slice.Tensor, (1, 3, 4), [3]),
        (aten.slice.Tensor, (1, None, 1), [0]),
        (aten.slice.Tensor, (-2, 2, 3), [2]),
        (aten.split_with_sizes.default, ([1, 1, 1, 1], -2), [*range(4)]),
        (aten.slice.Tensor, (1, 0, 2), []),
        (aten.split_with_sizes.default, ([2, 2], 1), []),
        (aten.split_with_sizes.default, ([1, 3], 1), []),
        (aten.slice.Tensor, (0, 2, 3), []),
        (aten.sum.dim_IntList, ([1],), []),
    ],
    ids=str,
)
def test_parts_along_a_dim(op, args, found):
    assert [pick.number for pick in picks(calls((op, *args)), 1)] == found
