"""Random ops draw from named streams: equal where the value is the same on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from passes.base import StageGraph
from passes.dropout import name_streams
from planner.placement.types import I, Placement, V
from tests.tools.graphs import bare_context

aten = torch.ops.aten


def drawn(target, args: tuple, placement: Placement, rank: int, microbatch: int = 0) -> Tensor:
    graph, root = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    node = graph.call_function(target, tuple(x if a is X else a for a in args))
    node.meta = {"origin": "draw", "placement": placement}
    graph.output(node)
    context = bare_context(tp_rank=rank, seed=7)
    context.random.begin(0, microbatch)
    name_streams(StageGraph(0, graph, root), context)
    torch.manual_seed(rank)  # ranks' default generators differ
    before = torch.get_rng_state()
    result = fx.GraphModule(root, graph)(torch.ones(4, 6))
    assert torch.equal(before, torch.get_rng_state())
    return result


X = object()
DRAWS = [
    (aten.bernoulli.p, (X, 0.5)),
    (aten.rand_like.default, (X,)),
    (aten.rand.default, ([4, 6],)),
    (aten.randn.default, ([4, 6],)),
    (aten.dropout.default, (X, 0.5, True)),
]


def test_a_draw_of_type_i_is_equal_on_all_ranks():
    for target, args in DRAWS:
        assert torch.equal(drawn(target, args, I, 0), drawn(target, args, I, 1)), target


def test_draws_differ_between_microbatches():
    for target, args in DRAWS:
        assert not torch.equal(drawn(target, args, I, 0), drawn(target, args, I, 0, microbatch=1)), target


def test_sharded_dropout_differs_between_ranks():
    args = (X, 0.5, True)
    assert not torch.equal(*(drawn(aten.dropout.default, args, V(1, 12), rank) for rank in (0, 1)))
