"""Random ops draw from named streams: equal where the value is the same on all ranks."""

from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from passes.base import StageGraph
from passes.dropout import name_streams
from passes.ops.axis import AxisHandle
from passes.ops.dropout import OWN_ATTENTION, stream_dropout, stream_random
from passes.ops.random_state import RandomState
from passes.types.types import I, Placement, V
from planner import plan
from planner.lower import lower
from tests.models.plannable import Decoder, Sizes, spec_of
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


def test_ranks_of_cp_draw_their_own_for_their_tokens_and_alike_for_what_is_whole():
    def tail(x: Tensor) -> Tensor:
        return F.dropout(x, 0.1) * torch.rand(x.shape[0], 1, 1)

    made = plan(Decoder([Sizes()], tail), spec_of("gpt2", mesh={"cp": 2, "tp": 2}))
    found: list[dict[str, tuple[int, bool]]] = []
    for rank in range(4):
        (stage,) = lower(made, rank).stages
        draws = [n for n in stage.module.graph.nodes if n.target in (stream_dropout, stream_random)]
        found.append({n.target.__name__: n.args[3:5] if n.target is stream_dropout else n.args[2:4] for n in draws})
    for_tokens, of_rows = ([ops[name] for ops in found] for name in ("stream_dropout", "stream_random"))
    assert for_tokens[0] == for_tokens[1] != for_tokens[2] == for_tokens[3]
    assert len(set(of_rows)) == 1


@pytest.mark.parametrize("attention", OWN_ATTENTION, ids=lambda function: function.__name__)
def test_attention_of_our_own_draws_from_a_stream_and_not_in_an_evaluation(attention):
    graph, root, context = fx.Graph(), nn.Module(), bare_context(seed=7)
    q, k = graph.placeholder("q"), graph.placeholder("k")
    root.axis = AxisHandle("of one rank", 1, 0)  # pyright: ignore[reportArgumentType]
    num_axes = [p.annotation for p in signature(attention).parameters.values()].count(AxisHandle)
    axes = [graph.create_node("get_attr", "axis") for _ in range(num_axes)]
    node = graph.call_function(attention, (q, k, k, *axes), {"dropout_p": 0.5})
    node.meta = {"origin": "draw", "placement": I}
    graph.output(node)
    name_streams(StageGraph(0, graph, root), context)
    module, x = fx.GraphModule(root, graph), torch.randn(1, 2, 8, 4)
    first, before = module(x, x), torch.get_rng_state()
    assert torch.equal(first, module(x, x))
    assert torch.equal(before, torch.get_rng_state())
    context.random.training = False
    assert torch.equal(module(x, x), module(x, x))
    assert not torch.equal(first, module(x, x))


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
