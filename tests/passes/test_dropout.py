"""Random ops draw from named streams: equal where the value is the same on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from passes.base import StageGraph
from passes.dropout import name_streams
from passes.ops.dropout import stream_dropout
from passes.ops.random_state import RandomState
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_dropout_keeps_is_scaled_as_float32_scales_it(dtype):
    """A factor of bfloat16 would be 1.109375 for 1.1111, on every element."""
    x = torch.linspace(0.5, 4.0, 4096).to(dtype).requires_grad_()
    y = stream_dropout(x, 0.1, RandomState(0, 0), 1, False)
    y.backward(x.detach())
    kept = y != 0
    exact = x.detach().double() / 0.9
    expected = torch.where(kept, exact if dtype == torch.float64 else exact.to(dtype).double(), 0.0)
    assert 0.88 < kept.double().mean() < 0.92
    torch.testing.assert_close(y.detach().double(), expected, rtol=2e-7, atol=0.0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected, rtol=2e-7, atol=0.0)


def test_dropout_keeps_one_byte_an_element_for_its_backward():
    saved: list[Tensor] = []
    x = torch.ones(64, 32, dtype=torch.bfloat16, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        stream_dropout(x, 0.1, RandomState(0, 0), 1, False)
    assert sum(t.nbytes for t in saved) == x.numel()


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(p):
    x = torch.randn(16)
    assert torch.equal(stream_dropout(x, p, RandomState(0, 0), 1, False), x * (1 - p))


def test_a_draw_says_nothing_about_those_before_it():
    random = RandomState(0, 0)
    random.begin(3, 5)
    generators = [random.generator(torch.device("cpu"), op, False).initial_seed() for op in (1, 2, 1)]
    assert generators[0] == generators[2] != generators[1]
